/**
 * A lab on a page without a kernel, such as a saved notebook: the view of one update is live, and k moves among runs that
 * were recorded (record.py).
 */
import { chart, el } from "./charts.js";
import { showOneUpdate } from "./one_update.js";
import { plain, VIEWS } from "./plots.js";

/**
 * @typedef {Object} Recorded
 * @property {string} sentence What was recorded.
 * @property {string[]} columns
 * @property {number} unit Dots are whole numbers of these.
 * @property {number} missing The number of a dot that is not there.
 * @property {Object[]} runs Each with k, b, batch, updates, counts, perUpdate; rows and dots as base64; its point.
 * @property {Object} toy constants and noise of the view of one update, noise as base64.
 */

function bytes(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0)).buffer;
}

/** The data that the views draw when this run is chosen, with the points of all others. */
export function dataOf(/** @type {Recorded} */ recorded, chosen) {
  const { rows, dots, point, ...facts } = recorded.runs[chosen];
  const run = {
    ...facts,
    number: chosen,
    name: `k = ${facts.k}, b = ${facts.b}`,
    style: 0,
    columns: recorded.columns,
    rows: new Float32Array(bytes(rows)),
    dots: Float32Array.from(
      new Uint16Array(bytes(dots)),
      (value) => (value === recorded.missing ? NaN : value * recorded.unit),
    ),
  };
  const points = recorded.runs.filter((_, i) => i !== chosen).map((each) => each.point);
  const experiment = { k: run.k, b: run.b, updates: run.updates };
  return { runs: [run], current: run, points, point, window: [], windowAt: 0, against: "updates", experiment };
}

/** What showOneUpdate needs of a widget's model. */
function modelOf(/** @type {Recorded} */ { toy }, k) {
  const values = { ...toy, noise: new DataView(bytes(toy.noise)), accumulation_steps: k, towers: 1 };
  const heard = [];
  return {
    get: (name) => values[name],
    set: (name, value) => {
      values[name] = value;
      heard.filter(([event]) => event === `change:${name}`).forEach(([, hear]) => hear());
    },
    on: (event, hear) => heard.push([event, hear]),
    off: () => {},
    save_changes: () => {},
  };
}

/** Put a lab in the place of the picture that stands for it. */
export function showRecorded(/** @type {Element} */ root, /** @type {Recorded} */ recorded) {
  let chosen = recorded.runs.findIndex(({ k }) => k === 5);
  const data = recorded.runs.map((_, i) => dataOf(recorded, i));
  const model = modelOf(recorded, recorded.runs[chosen].k);
  const slider = el("input", { type: "range", min: 0, max: recorded.runs.length - 1, value: chosen });
  slider.setAttribute("aria-label", "k micro-batches");
  const value = el("b");
  const batch = el("span");
  const toy = el("div");
  const charts = Object.keys(VIEWS).map((name) => chart(name, () => data[chosen], root));
  const grid = el("div", { className: "gradlab-recorded-views" }, toy, ...charts.map(({ node }) => node));
  root.replaceChildren(
    el("div", { className: "gradlab-recorded-top" }, "k micro-batches ", slider, value, batch),
    grid,
    el("small", { textContent: recorded.sentence }),
  );
  showOneUpdate({ model, el: toy });

  function choose() {
    chosen = Number(slider.value);
    const { k, b, batch: all } = recorded.runs[chosen];
    slider.setAttribute("aria-valuetext", k);
    value.textContent = k;
    batch.textContent = `${k} × ${b} = ${plain(all)} examples an update` +
      (k > 1 ? ` · noise of the loss ÷ ${Math.sqrt(k).toFixed(1)}` : "");
    model.set("accumulation_steps", k);
    redraw();
  }

  function redraw() {
    charts.forEach(({ schedule }) => schedule());
  }

  slider.addEventListener("input", choose);
  charts.forEach(({ canvas }) => new ResizeObserver(redraw).observe(canvas));
  new MutationObserver(redraw).observe(document.body, { attributes: true }); // themes
  choose();
}
