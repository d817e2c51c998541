/** The five views of a training on the page: asking Python for numbers, drawing them, and reading values from them. */
import { fitted, looks } from "./canvas.js";
import { countsOf, drawn, newRun, PACE, Workers } from "./offline/page_run.js";
import {
  boxes,
  colorOf,
  drawPlot,
  latest,
  merged,
  nearest,
  places,
  plain,
  stepped,
  styleOf,
  STYLES,
  VIEWS,
  words,
} from "./plots.js";

const USED = ["click", "keyup", "pointerup"];
const PATIENCE = 10000; // milliseconds without an answer, after which the page says so
const COMPARED = 20; // a run of fewer updates is not kept beside the next one, if its length is not a number of them
const NUDGE = 2000; // milliseconds after which an unanswered message is sent again

export const el = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

/** A view: its canvas, what is read from it, and its words. */
export function chart(name, data, root) {
  const canvas = el("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", `${VIEWS[name].title}. The arrow keys read values.`);
  const readout = el("div", { className: "gradlab-readout", hidden: true });
  const said = el("span", { className: "gradlab-unseen" });
  said.setAttribute("aria-live", "polite");
  const described = el("span", { className: `gradlab-unseen gradlab-words-${name}` });
  const last = el("span", { className: "gradlab-latest" });
  const ask = el("button", { className: "gradlab-ask", textContent: "?", title: "What does this view show?" });
  ask.setAttribute("aria-label", `What does this view show: ${VIEWS[name].title}?`);
  const about = el("div", { className: "gradlab-about", textContent: VIEWS[name].about, hidden: true });
  const explain = (shown) => {
    about.hidden = !shown;
    ask.setAttribute("aria-expanded", shown);
  };
  explain(false);
  ask.addEventListener("click", () => explain(about.hidden));
  const head = el("div", { className: "gradlab-head" }, el("b", { textContent: VIEWS[name].title }), ask, last);
  const node = el(
    "div",
    { className: `gradlab-view gradlab-view-${name}` },
    head,
    canvas,
    readout,
    about,
    said,
    described,
  );
  node.dataset.view = name;
  let plots = VIEWS[name].plots(data());
  let cursor = null;
  let frame = null;

  function draw() {
    frame = null;
    plots = VIEWS[name].plots(data());
    described.textContent = words(name, data(), plots);
    last.textContent = latest(data(), plots);
    node.dataset.updates = data().runs[0]?.counts[0] ?? 0;
    const { context, width, height } = fitted(canvas);
    if (!width || !height) return; // hidden: the next resize draws
    const colors = looks(root);
    boxes(plots.length, width, height).forEach((box, i) => drawPlot(context, plots[i], box, colors, cursor));
    show(boxes(1, width, height)[0], colors);
  }

  /** Show what is read beside the place where it is read. */
  function show(box, colors) {
    const found = cursor === null ? [] : plots.map((plot) => nearest(plot, cursor)).filter(Boolean);
    readout.hidden = !found.length;
    readout.replaceChildren();
    if (!found.length) {
      said.textContent = "";
      return;
    }
    const values = found.flatMap((each) => each.values);
    readout.append(el("b", { textContent: found[0].said }));
    for (const { name: run, style, said: value } of values) {
      const mark = el("span", { textContent: style === null ? "○" : STYLES[style].mark });
      mark.style.color = colorOf(style, colors);
      readout.append(
        el("div", {}, mark, ` ${value}`, values.length > 1 ? el("small", { textContent: ` ${run}` }) : ""),
      );
    }
    const x = places(plots[0], box).x(found[0].x);
    const left = x < box.left + box.width / 2;
    Object.assign(readout.style, {
      left: left ? `${x + 14}px` : "",
      right: left ? "" : `${canvas.clientWidth - x + 4}px`,
    });
    const words = `${found[0].said}: ${values.map(({ name: run, said: value }) => `${run} ${value}`).join(", ")}`;
    if (said.textContent !== words) said.textContent = words; // the same words again would be said again
  }

  function schedule() {
    frame = frame ?? requestAnimationFrame(draw);
  }

  function read(place) {
    cursor = place;
    schedule();
  }

  canvas.addEventListener("pointermove", (event) => {
    read(places(plots[0], boxes(1, canvas.clientWidth, canvas.clientHeight)[0]).valueAt(event.offsetX));
  });
  canvas.addEventListener("pointerleave", () => read(null));
  canvas.addEventListener("blur", () => read(null));
  canvas.addEventListener("keydown", (event) => {
    const end = { Home: 1, End: -1 }[event.key]; // a step from outside
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
    if (!end && !step && event.key !== "Escape") return;
    event.preventDefault();
    read(end ? stepped(plots[0], null, end) : step ? stepped(plots[0], cursor, step) : null);
  });
  return { node, canvas, schedule };
}

/** A button that shows and hides all views but the first ones. */
export function moreViews(charts, first) {
  const others = charts.slice(first);
  const button = el("button", { className: "gradlab-more-views", hidden: !others.length });
  const show = (shown) => {
    others.forEach(({ node }) => node.hidden = !shown);
    button.textContent = shown ? "fewer views" : "more views";
    button.setAttribute("aria-expanded", shown);
  };
  show(false);
  button.addEventListener("click", () => show(others[0].node.hidden));
  return button;
}

/** The chips that name the runs, hide them, and rename and remove pinned ones; below them, their table. */
function chips(model, hidden, changed) {
  const list = el("div", { className: "gradlab-chips" });
  const rows = el("tbody");
  const heads = el("tr");
  const table = el("div", { className: "gradlab-table", hidden: true }, el("table", {}, el("thead", {}, heads), rows));
  const toggle = el("button", { className: "gradlab-toggle", textContent: "table" });
  const open = (opened) => {
    table.hidden = !opened;
    toggle.setAttribute("aria-expanded", opened);
  };
  open(false);
  toggle.addEventListener("click", () => open(table.hidden));
  toggle.dataset.part = "table";
  let shown = "";
  let wanted = null; // the part that gets the focus next

  function name(run, label, colors) {
    const mark = el("span", { textContent: STYLES[run.style].mark });
    mark.style.color = colorOf(run.style, colors);
    const button = el("button", { className: "gradlab-chip-name", title: "Hide or show this run." }, mark, ` ${label}`);
    button.setAttribute("aria-pressed", !hidden.has(run.number));
    button.addEventListener("click", () => {
      hidden.has(run.number) ? hidden.delete(run.number) : hidden.add(run.number);
      changed();
    });
    return button;
  }

  function rename(run, chip) {
    const field = el("input", { value: run.name, className: "gradlab-chip-field" });
    field.setAttribute("aria-label", "name of the pinned run");
    let left = false; // a field that is taken away also loses the focus
    const leave = (send) => {
      if (left) return;
      left = true;
      if (send) model.send({ rename: run.number, name: field.value });
      field.remove();
      wanted = `${run.number} gradlab-rename`;
      shown = "";
      changed();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // the same key would press the button that gets the focus now
      leave(event.key === "Enter");
    });
    field.addEventListener("blur", () => leave(true));
    chip.replaceChildren(field);
    field.focus();
  }

  function update(runs, now, cells, colors) {
    const key = JSON.stringify([
      runs.map((run) => [run.number, run.name, run.style, hidden.has(run.number)]),
      colors.text,
    ]);
    if (key === shown || list.querySelector("input")) return;
    shown = key;
    const focused = wanted ?? document.activeElement?.getAttribute("data-part");
    wanted = null;
    list.replaceChildren(...runs.map((run, i) => {
      const pinned = i > 0 || !now;
      const chip = el("span", { className: "gradlab-chip" }, name(run, run.name, colors));
      chip.style.borderColor = colorOf(run.style, colors);
      const act = (part, text, title, action) => {
        const button = el("button", { className: `gradlab-${part}`, textContent: text, title: `${title} ${run.name}` });
        button.setAttribute("aria-label", button.title);
        button.addEventListener("click", action);
        chip.append(button);
      };
      if (pinned) {
        act("rename", "✎", "Rename", () => rename(run, chip));
        act("remove", "✕", "Remove", () => {
          const next = runs[i + 1] ?? runs[i - 1];
          wanted = next ? `${next.number} gradlab-chip-name` : null;
          model.send({ remove: run.number });
        });
      }
      for (const button of chip.children) button.dataset.part = `${run.number} ${button.className}`;
      return chip;
    }));
    const pinned = runs.filter((run) => run.cells.length);
    if (pinned.length) list.append(toggle);
    else open(false);
    [...list.querySelectorAll("button")].find((button) => button.dataset.part === focused)?.focus();
    const cell = (tag) => (text) => el(tag, { textContent: text });
    heads.replaceChildren(...["pinned run", ...cells].map(cell("th")));
    rows.replaceChildren(...pinned.map((run) => el("tr", {}, ...[run.name, ...run.cells].map(cell("td")))));
  }

  return { list, table, update };
}

const previews = new WeakMap(); // by what Python says of them

/** A run of the page alone, from a few seeds, until the kernel has one. */
class Preview {
  constructor(/** @type {import("./offline/page_run.js").Trained} */ facts) {
    this.facts = facts;
    this.run = newRun(0, facts.settings, facts.seeds);
    this.views = new Set(); // functions that draw it
    this.drawing = null; // the timer of the next drawing
    this.workers = new Workers(facts, (told) => this.take(told), () => {}); // a page without workers shows none
    this.workers.begin(0, facts.settings);
  }

  take({ seed, made }) {
    const first = !this.count();
    this.run.seeds[seed].push(...made);
    if (first) this.draw();
    else this.drawing = this.drawing ?? setTimeout(() => this.draw(), PACE);
  }

  draw() {
    this.drawing = null;
    this.views.forEach((draw) => draw());
  }

  count() {
    return Math.max(...countsOf(this.run));
  }

  data() {
    if (!this.count()) return null;
    const { k, b } = this.facts.settings;
    const current = drawn(this.run, 0, `in the page: k = ${k}, b = ${b}`);
    const experiment = { ...this.facts.settings, updates: this.facts.updates };
    return { runs: [current], current, points: [], point: current.point, experiment };
  }

  end() {
    clearTimeout(this.drawing);
    this.workers.end();
  }
}

/** Train in the page while the kernel loads TensorFlow: from when the page hears of the lab, before it shows it. */
function initialize({ model }) {
  let preview = null;

  function change() {
    preview?.end();
    preview = null;
    const facts = model.get("preview");
    if (!facts.worker) return;
    try {
      preview = new Preview(facts);
    } catch {
      return; // a page that lets nothing compute beside it waits for the kernel
    }
    previews.set(facts, preview);
  }

  model.on("change:preview", change);
  change();
  return () => {
    preview?.end();
    model.off("change:preview", change);
  };
}

/** Tell a classroom's server that its page goes away. */
function leave() {
  const { kernelId, baseUrl } = JSON.parse(document.getElementById("jupyter-config-data")?.textContent ?? "{}");
  if (kernelId) navigator.sendBeacon(`${baseUrl}classroom/farewell/${kernelId}`);
}

function showCharts({ model, el: root }) {
  const page = crypto.getRandomValues(new Uint32Array(2)).join("-"); // the name of this view of the widget
  const known = {
    sent: [],
    columns: [],
    cells: [],
    now: false,
    points: [],
    revision: null, // of the points
    point: null,
    window: [],
    windowAt: 0,
    against: "updates",
  };
  const experiment = { k: 1, b: 1, updates: null };
  const store = new Map(); // all runs by number
  const hidden = new Set(); // numbers of runs
  let ghost = null; // the run before the current one, if another one was asked for
  let preview = null; // a run of the page, until the kernel has one
  let asked = null; // the timer that runs while an answer is expected
  let again = null; // the timer of the next question
  let late = false; // whether there was news after the last question
  let heard = false; // whether Python knows that the page shows the lab
  let nudges = null; // the timer that sends unanswered messages again
  let visible = false;
  let restarted = false; // whether the kernel was, which knows nothing of this lab then

  function data() {
    const runs = known.sent.map((number) => store.get(number)).filter((run) => !hidden.has(run.number));
    const trained = preview?.data();
    if (trained) return { ...known, ...trained };
    const current = known.now && runs[0]?.number === known.sent[0] ? runs[0] : null;
    return { runs: current && ghost ? [...runs, ghost] : runs, current, experiment, ...known };
  }

  const charts = model.get("shown").map((name) => chart(name, data, root));
  const named = chips(model, hidden, redraw);
  const lost = el("div", { className: "gradlab-lost", hidden: true });
  lost.setAttribute("role", "alert");
  const own = el("div", { className: "gradlab-own", hidden: true });
  own.setAttribute("role", "status");
  const below = el("div", { className: "gradlab-below" }, moreViews(charts, model.get("first")));
  root.append(...charts.map(({ node }) => node), own, lost, below);
  if (model.get("chips")) {
    below.append(named.list);
    root.append(named.table);
  }

  function redraw() {
    charts.forEach(({ schedule }) => schedule());
    own.hidden = !preview?.data();
    if (!own.hidden) {
      const digits = plain(preview.facts.trainingExamples);
      own.textContent = `TensorFlow is loading. Until then the page itself trains, on ${digits} digits.`;
    }
    named.update(known.sent.map((number) => store.get(number)), known.now, known.cells, looks(root));
  }

  /** Show what the page trains by itself, while it does. */
  function changePreview() {
    preview?.views.delete(redraw);
    preview = previews.get(model.get("preview")) ?? null;
    preview?.views.add(redraw);
    redraw();
  }

  function endPreview() {
    if (!preview) return;
    preview.end();
    previews.delete(preview.facts);
    changePreview();
  }

  function ask() {
    clearTimeout(again);
    if (!visible || document.hidden || restarted) return;
    if (asked) {
      late = true;
      return;
    }
    late = false;
    asked = setTimeout(complain, PATIENCE);
    question();
  }

  function question() {
    const have = Object.fromEntries([...store].map(([number, run]) => [number, run.counts]));
    model.send({ ask: page, have, revision: known.revision });
  }

  /** The first messages may reach the kernel before it has a shell for the page, and then wait for the cells. */
  function nudge() {
    if (restarted) return;
    if (!heard) model.send({ seen: true }); // Python trains the first run now
    if (asked) question();
  }

  function news() {
    heard = true;
    ask();
  }

  function say(sentence) {
    lost.hidden = false;
    lost.textContent = sentence;
  }

  function complain() {
    asked = null;
    say(
      "No answer from the kernel for 10 seconds: it is busy with a cell, was restarted, or is gone. " +
        "After a restart, run the cell again, or reload the page.",
    );
  }

  /**
   * The page is told of a restart, and does not wait for an answer. A kernel that ends stops its runs, so its last
   * answer may say that the run is over, after which nothing would be asked.
   */
  function disconnect() {
    restarted = true;
    endPreview();
    [asked, again].forEach(clearTimeout);
    say("The kernel was restarted, and this lab is lost: run the cell again.");
  }

  function save(name, { buffer, byteOffset, byteLength }) {
    const address = URL.createObjectURL(new Blob([buffer.slice(byteOffset, byteOffset + byteLength)]));
    el("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), PATIENCE);
  }

  function take(content, buffers) {
    if (content.download) {
      save(content.download, buffers[0]);
      return;
    }
    if (content.to !== page || restarted) return; // for another view of the same lab, or of the kernel that ended
    lost.hidden = true;
    clearTimeout(asked);
    asked = null;
    if (content.fault) return; // the status line says it
    const floats = ({ buffer, byteOffset, byteLength }) =>
      new Float32Array(buffer.slice(byteOffset, byteOffset + byteLength));
    content.runs.forEach((sent, i) => {
      const before = store.get(sent.number);
      const has = before ? before.rows.length / content.columns.length : 0;
      if (sent.first > has) late = true; // rows between are missing
      else {store.set(
          sent.number,
          merged(before, sent, content.columns, floats(buffers[2 * i]), floats(buffers[2 * i + 1])),
        );}
    });
    haunt(content);
    known.sent = content.runs.map(({ number }) => number).filter((number) => store.has(number));
    known.sent.forEach((number, i) => {
      store.get(number).style = styleOf(content.now ? i : i + 1);
    });
    [...store.keys()].filter((number) => !known.sent.includes(number)).forEach((number) => store.delete(number));
    for (const name of ["columns", "cells", "now", "revision", "point", "window", "windowAt", "against"]) {
      known[name] = content[name];
    }
    known.points = content.points ?? known.points;
    Object.assign(experiment, content.experiment);
    // Draws the runs, which have their colors by now
    if (content.now && Math.max(...content.runs[0].counts) > 0) endPreview();
    redraw();
    if (late) ask();
    else if (content.again !== null) again = setTimeout(() => requestAnimationFrame(ask), content.again);
  }

  /** Keep the run before the current one in the views, so that what a control has changed is seen. */
  function haunt({ now, runs }) {
    const before = known.now ? store.get(known.sent[0]) : null;
    if (!now) ghost = null;
    else if (before && before.number !== runs[0].number && before.name !== runs[0].name) {
      const whole = Math.min(...before.counts) >= (before.updates ?? COMPARED);
      if (whole) ghost = { ...before, style: null, name: before.name.replace("now:", "before:") };
    }
    if (ghost?.name.slice("before:".length) === runs[0]?.name.slice("now:".length)) ghost = null;
  }

  function look(entries) {
    visible = entries.at(-1).isIntersecting;
    if (visible) ask();
  }

  model.on("msg:custom", take);
  model.on("change:news", news);
  model.on("change:preview", changePreview);
  model.on("comm_live_update", disconnect); // a widget's connection is made before this, and then only ends
  document.addEventListener("visibilitychange", ask);
  addEventListener("pagehide", leave);
  const watched = new IntersectionObserver(look);
  const resized = new ResizeObserver(redraw);
  charts.forEach(({ canvas }) => resized.observe(canvas));
  const themed = new MutationObserver(redraw); // JupyterLab names its theme in an attribute of the body
  themed.observe(document.body, { attributes: true });
  let waiting = requestAnimationFrame(function begin() {
    const lab = root.closest(".gradlab-lab");
    if (!lab) {
      waiting = requestAnimationFrame(begin); // not on the page yet
      return;
    }
    watched.observe(lab);
    nudge();
    nudges = setInterval(nudge, NUDGE);
    USED.forEach((event) => lab.addEventListener(event, ask)); // a kernel that is gone is noticed when it is needed
  });
  changePreview();
  return () => {
    preview?.views.delete(redraw);
    visible = false; // no frame that is under way asks again
    [asked, again].forEach(clearTimeout);
    clearInterval(nudges);
    cancelAnimationFrame(waiting);
    model.off("msg:custom", take);
    model.off("change:news", news);
    model.off("change:preview", changePreview);
    model.off("comm_live_update", disconnect);
    document.removeEventListener("visibilitychange", ask);
    removeEventListener("pagehide", leave);
    USED.forEach((event) => root.closest(".gradlab-lab")?.removeEventListener(event, ask));
    [watched, resized, themed].forEach((observer) => observer.disconnect());
  };
}

export default { initialize, render: showCharts };
