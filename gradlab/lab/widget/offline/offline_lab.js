/**
 * The lab on a page without a kernel: its controls start a training in the page (training.js), and the views follow it.
 */
import { looks } from "../canvas.js";
import { chart, el, moreViews } from "../charts.js";
import { showOneUpdate } from "../one_update.js";
import { colorOf, column, contrast, plain, STYLES, VIEWS } from "../plots.js";
import { bytes } from "./digits.js";
import { countsOf, drawn, newRun, PACE, Workers } from "./page_run.js";

/**
 * @typedef {import("./page_run.js").Trained & OwnFacts} Page What Python writes into the page.
 *
 * @typedef {Object} OwnFacts
 * @property {string} instead What the lab trains in a kernel, if the page cannot.
 * @property {string[]} hide Names of controls and views.
 * @property {string[]} lock Names of controls.
 * @property {string} against The first horizontal axis of the accuracy.
 * @property {boolean} tour Whether k moves by itself.
 * @property {Object} toy constants and noise of the view of one update, noise as base64.
 */

const TOUR = [1, 5, 20]; // k of the runs that a page shows until it is touched
const ROOM = 50; // examples, of the imagined card beside the effective batch
const REST = 4000; // milliseconds between two of them

const SLIDERS = [
  { key: "k", name: "accumulation_steps", label: "k micro-batches", min: 1, max: 50, step: 1 },
  { key: "b", name: "microbatch_size", label: "b examples", min: 1, max: 100, step: 1 },
  { key: "learningRate", name: "learning_rate", label: "learning rate", min: -4, max: 0, step: 0.1, log: true },
];
const OPTIMIZERS = ["adam", "adamw", "momentum", "sgd"];
const AXES = ["updates", "examples", "seconds"];

/** What showOneUpdate needs of a widget's model. */
export function modelOf(/** @type {Page} */ { toy }, k) {
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

/** The name of a run: k, b, and what differs from what the page began with. */
function nameOf({ k, b, learningRate, optimizer }, first) {
  const rate = learningRate === first.learningRate ? "" : `, rate ${plain(learningRate, 2)}`;
  const rule = optimizer === first.optimizer ? "" : `, ${optimizer}`;
  return `k = ${k}, b = ${b}${rate}${rule}`;
}

/** What changed between two runs that differ in k, as both have measured it. "" where they do not compare. */
function compare(now, before) {
  const found = contrast(before?.point, now.point);
  if (!found) return "";
  const { less, more, predicted, measured } = found;
  const [shorter, longer] = before.k < now.k ? [before, now] : [now, before];
  // The mean, because the workers may share a processor, which halts long updates more often than short ones.
  const seconds = (run) => column(run, "seconds").at(-1) / Math.max(...run.counts);
  return `From windows of ${less.k} to ${more.k} micro-batches: noise ÷ ${predicted} predicted, ÷ ${measured} measured; ` +
    `${plain(seconds(longer) / seconds(shorter), 2)} times the time and ${
      plain(more.k / less.k, 2)
    } times the examples ` +
    "for each update.";
}

/** A bar of the examples in memory at once, inside one of the effective batch, with a mark at the room of a card. */
function showMemory(bar, words, b, batch) {
  const fits = b <= ROOM ? "fit" : "do not fit";
  const parts = { "batch-outline": batch, held: b, room: ROOM };
  bar.replaceChildren(
    ...Object.entries(parts).map(([name, part]) => {
      const drawn = el("span", { className: `gradlab-${name}` });
      drawn.style.width = `${100 * part / Math.max(batch, ROOM)}%`;
      return drawn;
    }),
  );
  bar.dataset.fits = fits;
  bar.title = `${b} of ${batch} examples are in memory at once; they ${fits} on a card for ${ROOM}`;
  bar.setAttribute("aria-label", bar.title);
  words.textContent = `${b} in memory at once`;
}

/** The controls of a page, in its first and second row, and what they say beside them. */
class Controls {
  constructor(/** @type {Page} */ page, settings) {
    this.settings = settings;
    this.sliders = SLIDERS.map((slider) => {
      const value = slider.log ? Math.log10(settings[slider.key]) : settings[slider.key];
      const { min, max, step } = slider;
      const ends = { min: Math.min(min, value), max: Math.max(max, value) };
      const input = el("input", { type: "range", ...ends, step, value });
      return { ...slider, input, said: el("b") };
    });
    const list = (values) => el("select", {}, ...values.map((value) => el("option", {}, value)));
    this.optimizer = list(OPTIMIZERS);
    this.optimizer.value = settings.optimizer;
    this.against = list(AXES);
    this.against.value = page.against;
    this.run = el("button", { textContent: "Run" });
    this.pause = el("button", { textContent: "Pause" });
    this.batch = el("span");
    this.memory = el("span", { className: "gradlab-memory" });
    this.memory.setAttribute("role", "img");
    this.held = el("span");
    const named = (name, node, label = "", ...more) => {
      node.dataset.control = name;
      node.disabled = page.lock.includes(name);
      const shown = label ? el("label", {}, label, node, ...more) : node;
      shown.hidden = page.hide.includes(name);
      return shown;
    };
    this.first = [
      ...this.sliders.map(({ name, input, label, said }) => named(name, input, label, said)),
      named("run", this.run),
      named("pause", this.pause),
    ];
    this.second = [
      this.batch,
      el("span", {}, this.memory, this.held),
      named("optimizer", this.optimizer, "optimizer"),
      named("against", this.against, "accuracy against"),
    ];
  }

  /** The value that a slider was moved to. */
  valueOf({ input, log }) {
    return log ? 10 ** Number(input.value) : Number(input.value);
  }

  show(state) {
    for (const { key, input, said } of this.sliders) {
      said.textContent = plain(this.settings[key], 2);
      input.setAttribute("aria-valuetext", said.textContent);
    }
    const { k, b } = this.settings;
    const noise = k > 1 ? ` · noise of the loss ÷ ${Math.sqrt(k).toFixed(1)}` : "";
    this.batch.textContent = `${k} × ${b} = ${plain(k * b, 4)} examples an update${noise}`;
    showMemory(this.memory, this.held, b, k * b);
    this.pause.textContent = state === "paused" ? "Resume" : "Pause";
    this.pause.disabled = !["running", "paused"].includes(state);
  }
}

/** Put a lab in the place of the picture that stands for it. */
export function showOffline(/** @type {HTMLElement} */ root, /** @type {Page} */ page) {
  const settings = { ...page.settings };
  const model = modelOf(page, settings.k);
  const controls = new Controls(page, settings);
  const points = new Map(); // of earlier runs, by their names
  let workers = null; // begin with the first run
  let run = null;
  let before = null; // the run that is compared
  let touring = page.tour && !matchMedia("(prefers-reduced-motion: reduce)").matches;
  let inSight = false;
  let timer = null; // of the tour
  let drawing = null; // the timer of the next drawing

  const status = el("span");
  status.setAttribute("role", "status");
  const counted = el("span"); // changes too often to be read aloud
  const progress = el("progress", { max: page.updates, value: 0 });
  progress.setAttribute("aria-label", "updates made");
  const compared = el("div", { className: "gradlab-contrast" });
  const legend = el("div", { className: "gradlab-offline-row" });
  const toy = el("div", { hidden: page.hide.includes("toy") });
  const charts = Object.keys(VIEWS).filter((name) => !page.hide.includes(name)).map((name) => chart(name, data, root));
  const instead = page.instead && ` This lab itself needs a kernel: it trains ${page.instead}.`;
  root.replaceChildren(
    el("div", { className: "gradlab-offline-row" }, ...controls.first, progress, counted, status),
    el("div", { className: "gradlab-offline-row" }, ...controls.second),
    compared,
    el("div", { className: "gradlab-offline-views" }, toy, ...charts.map(({ node }) => node)),
    el("div", { className: "gradlab-offline-row" }, moreViews(charts, page.hide.includes("toy") ? 3 : 2), legend),
    el("small", {
      textContent:
        `This page itself trains the network 784-128-10, on ${plain(page.trainingExamples)} digits of MNIST. ` +
        `In a kernel, the lab trains in TensorFlow, on the whole data set.${instead}`,
    }),
  );
  showOneUpdate({ model, el: toy });

  const name = (each) => nameOf(each.settings, page.settings);

  function data() {
    const current = run && drawn(run, 0, name(run));
    const compared = before && drawn(before, 1, `before: ${name(before)}`);
    return {
      runs: [current, compared].filter(Boolean),
      current,
      points: [...points.values()].filter((point) => point !== current?.point),
      point: current?.point ?? null,
      window: [],
      windowAt: 0,
      against: controls.against.value,
      experiment: { ...settings, updates: page.updates },
    };
  }

  function redraw() {
    clearTimeout(drawing);
    drawing = null;
    charts.forEach(({ schedule }) => schedule());
    const state = run?.state ?? "idle";
    const updates = run ? Math.max(...countsOf(run)) : 0;
    root.dataset.state = state;
    controls.show(state);
    progress.value = updates;
    const said = run ? run.fault ? `${state}: ${run.fault}` : state : "";
    if (status.textContent !== said) status.textContent = said;
    counted.textContent = run ? `${updates} of ${page.updates} updates` : "";
    const { runs, points: earlier } = data();
    compared.textContent = run ? compare(runs[0], runs[1]) : "";
    const colors = looks(root);
    const known = [...runs, ...(earlier.length ? [{ style: null, name: "earlier runs" }] : [])];
    legend.replaceChildren(...known.map(({ style, name }) => {
      const mark = el("span", { textContent: style === null ? "○" : STYLES[style].mark });
      mark.style.color = colorOf(style, colors);
      return el("span", {}, mark, ` ${name}`);
    }));
  }

  function begin() {
    clearTimeout(timer);
    if (run?.state === "finished") {
      before = run;
      points.delete(name(run)); // the last one comes last
      points.set(name(run), drawn(run, 1, "").point);
    }
    run = newRun((run?.number ?? 0) + 1, { ...settings }, page.seeds);
    try {
      workers ??= new Workers(page, take, fail);
    } catch (error) {
      fail(error);
      return;
    }
    workers.begin(run.number, run.settings);
    redraw();
  }

  function take({ number, seed, made, finished }) {
    if (number !== run.number) return; // of a run that another one has replaced
    const first = !run.seeds.some(({ length }) => length);
    run.seeds[seed].push(...made);
    run.training -= finished;
    if (!run.training) finish();
    if (first || !run.training) redraw();
    else drawing = drawing ?? setTimeout(redraw, PACE);
  }

  function fail({ message }) {
    run.state = "failed";
    run.fault = message ?? "the browser does not let this page compute beside it";
    redraw();
  }

  function finish() {
    run.state = Math.min(...countsOf(run)) < page.updates ? "diverged" : "finished";
    if (touring) timer = setTimeout(tour, REST);
  }

  function tour() {
    if (document.hidden || !inSight) {
      timer = setTimeout(tour, REST);
      return;
    }
    const slider = controls.sliders[0];
    slider.input.value = TOUR[(TOUR.indexOf(settings.k) + 1) % TOUR.length];
    move(slider);
  }

  function stopTour() {
    touring = false;
    clearTimeout(timer);
  }

  function move(slider) {
    settings[slider.key] = controls.valueOf(slider);
    model.set("accumulation_steps", settings.k);
    begin();
  }

  controls.sliders.forEach((slider) => slider.input.addEventListener("input", () => move(slider)));
  controls.optimizer.addEventListener("change", () => {
    settings.optimizer = controls.optimizer.value;
    begin();
  });
  controls.against.addEventListener("change", redraw);
  controls.run.addEventListener("click", begin);
  controls.pause.addEventListener("click", () => {
    run.state = run.state === "paused" ? "running" : "paused";
    workers.pause(run.state === "paused");
    redraw();
  });
  ["pointerdown", "keydown", "input", "change", "click"].forEach((event) => root.addEventListener(event, stopTour));
  charts.forEach(({ canvas }) => new ResizeObserver(redraw).observe(canvas));
  new MutationObserver(redraw).observe(document.body, { attributes: true }); // themes
  const seen = new IntersectionObserver((entries) => {
    inSight = entries.at(-1).isIntersecting;
    if (inSight && !run) begin();
  });
  seen.observe(root);
  redraw();
}
