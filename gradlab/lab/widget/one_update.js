/**
 * One update of the toy, drawn in the browser: the arithmetic of toy.py, with the noise that Python sends once.
 *
 * The first part is pure functions, which the tests compare with toy.py. The second draws on a canvas. The third is
 * the widget, which follows the slider inside the page, so it needs no kernel.
 */
import { arrow, dot, fitted, line, looks } from "./canvas.js";
import { describeRace, drawLossesOf, drawPaths, race, raceColors } from "./race.js";

/**
 * @typedef {Object} Toy What Python sends.
 * @property {number[]} curvature h, one for each weight.
 * @property {number} learningRate
 * @property {number} deviation The standard deviation of a micro-batch's gradient in each direction.
 * @property {number} updates The updates of a descent.
 * @property {number} most The micro-batches for which there is noise.
 * @property {number} unit The noise is a whole number of these.
 * @property {Int16Array} noise In these units, shape (updates, most, 2).
 */

/**
 * @typedef {Object} Descent
 * @property {number[][]} path The weights before each update and after the last.
 * @property {number[]} losses The losses at these weights.
 * @property {number} floor The mean loss at which the noise keeps the descent.
 */

/** The gradients of k micro-batches of one update, at these weights. */
export function gradients(/** @type {Toy} */ toy, at, update, k) {
  const found = [];
  for (let i = 0; i < k; i++) {
    const place = 2 * (update * toy.most + i);
    found.push([0, 1].map((d) => toy.curvature[d] * at[d] + toy.deviation * toy.unit * toy.noise[place + d]));
  }
  return found;
}

/** The sum of vectors of two numbers, divided by a number. */
export function sumOver(vectors, divisor) {
  return [0, 1].map((d) => vectors.reduce((sum, vector) => sum + vector[d], 0) / divisor);
}

/** @returns {Descent} The descent from a starting point with windows of k micro-batches. */
export function descend(/** @type {Toy} */ toy, start, k) {
  const { curvature, learningRate, deviation } = toy;
  const path = [start];
  for (let update = 0; update < toy.updates; update++) {
    const at = path[update];
    const mean = sumOver(gradients(toy, at, update, k), k);
    path.push([0, 1].map((d) => at[d] - learningRate * mean[d]));
  }
  const floors = curvature.map((h) => (learningRate * deviation ** 2) / (2 * k * (2 - learningRate * h)));
  return { path, losses: path.map((at) => loss(curvature, at)), floor: floors[0] + floors[1] };
}

function loss(curvature, at) {
  return (curvature[0] * at[0] ** 2 + curvature[1] * at[1] ** 2) / 2;
}

/** The sentence of toy.py for readers who cannot see the view. */
export function describe(/** @type {Toy} */ toy, /** @type {Descent} */ descent, k, update) {
  const found = gradients(toy, descent.path[update], update, k);
  const mean = sumOver(found, k);
  const away = found.reduce((sum, g) => sum + Math.hypot(g[0] - mean[0], g[1] - mean[1]), 0) / k;
  return (
    `Toy: ${k} micro-batch gradients, on average ${(k > 1 ? away : 0).toFixed(1)} away from their mean of length ` +
    `${Math.hypot(...mean).toFixed(1)}; the loss settles near ${descent.floor.toFixed(3)}.`
  );
}

/** What the next step shows: one more micro-batch, or after the last of them the update that they make. */
export function next(/** @type {{update: number, added: number}} */ { update, added }, k, updates) {
  return added < k ? { update, added: added + 1 } : { update: (update + 1) % updates, added: 0 };
}

const BOX = { x: [-6.5, 5.5], y: [-3.5, 3.5] }; // of the weights
const LEVELS = [0.5, 2, 6]; // contours of the loss, which fit into the box
const LOSSES = [3e-3, 20]; // the lower plot
const ARROW = 0.5; // the length of an arrow for a gradient of length 1
const KEY = "thick: mean · dashed: floor · drag the ring";
const FRAMES = 150; // of a race
const REACH = 28; // a press within so many pixels of the starting point grabs it

/** Functions from weights to pixels and back, for the valley in a box of this size. */
export function scales(width, height) {
  const scale = Math.min(width / (BOX.x[1] - BOX.x[0]), height / (BOX.y[1] - BOX.y[0]));
  const middle = [(BOX.x[0] + BOX.x[1]) / 2, (BOX.y[0] + BOX.y[1]) / 2];
  return {
    scale,
    toPixels: (w) => [width / 2 + (w[0] - middle[0]) * scale, height / 2 - (w[1] - middle[1]) * scale],
    toWeights: (p) => [
      Math.min(BOX.x[1], Math.max(BOX.x[0], middle[0] + (p[0] - width / 2) / scale)),
      Math.min(BOX.y[1], Math.max(BOX.y[0], middle[1] - (p[1] - height / 2) / scale)),
    ],
  };
}

function drawValley(context, box, toy, state, colors) {
  const { toPixels, scale } = scales(box.width, box.height);
  const ellipse = (level, style, width, dash) => {
    const radii = toy.curvature.map((h) => Math.sqrt((2 * level) / h) * scale);
    Object.assign(context, { strokeStyle: style, lineWidth: width });
    context.setLineDash(dash);
    context.beginPath();
    context.ellipse(...toPixels([0, 0]), ...radii, 0, 0, 2 * Math.PI);
    context.stroke();
    context.setLineDash([]);
  };
  LEVELS.forEach((level) => ellipse(level, colors.faint, 1, []));
  if (state.race) {
    drawPaths(context, state.race.runners, state.race.seen, toPixels, colors);
    return;
  }
  const { path, floor } = state.descent;
  ellipse(floor, colors.floor, 1.5, [5, 3]);
  const points = path.map(toPixels);
  context.globalAlpha = 0.4;
  line(context, points.slice(state.update), colors.path, 1);
  context.globalAlpha = 1;
  line(context, points.slice(0, state.update + 1), colors.path, 2);
  const at = path[state.update];
  const shown = gradients(toy, at, state.update, state.added);
  const pixels = (g) => [-g[0] * ARROW * scale, g[1] * ARROW * scale];
  shown.forEach((g, i) => {
    const newest = i === state.added - 1 && state.added < state.k;
    context.globalAlpha = newest ? 1 : Math.max(0.25, Math.min(0.6, 4 / state.k));
    arrow(context, toPixels(at), pixels(g), newest ? colors.floor : colors.path, newest ? 2 : 1.2);
  });
  context.globalAlpha = 1;
  if (shown.length) arrow(context, toPixels(at), pixels(sumOver(shown, state.k)), colors.text, 3.5);
  dot(context, points[0], 5, colors.ground, colors.path);
}

function drawLosses(context, box, toy, state, colors) {
  const logs = LOSSES.map(Math.log10);
  const x = (update) => box.left + (update / toy.updates) * (box.width - box.left - 6);
  const y = (value) => {
    const share = (Math.log10(Math.max(value, LOSSES[0])) - logs[0]) / (logs[1] - logs[0]);
    return box.top + (1 - Math.min(1, share)) * box.height;
  };
  Object.assign(context, { fillStyle: colors.soft, font: colors.font, textBaseline: "middle", textAlign: "right" });
  const ticks = [[0.1, "0.1"], [10, "10"], [0.01, "0.01"], [1, "1"]];
  for (const [value, label] of ticks.slice(0, box.height < 50 ? 2 : 4)) {
    line(context, [[box.left, y(value)], [box.width - 6, y(value)]], colors.faint, 0.6);
    context.fillText(label, box.left - 5, y(value));
  }
  if (state.race) {
    const share = { x: (part) => x(part * toy.updates), y };
    drawLossesOf(state.race.runners, state.race.seen, share, context, colors);
    return;
  }
  const points = state.descent.losses.map((value, update) => [x(update), y(value)]);
  line(context, points, colors.path, 1.2);
  line(context, [[box.left, y(state.descent.floor)], [box.width - 6, y(state.descent.floor)]], colors.floor, 1.5, [
    5,
    3,
  ]);
  dot(context, points[state.update], 3.5, colors.path, colors.ground);
}

function toyOf(model) {
  const view = model.get("noise");
  const noise = new Int16Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
  return { ...model.get("constants"), noise };
}

const HTML = `
  <div class="gradlab-head">
    <b>one update</b><span class="gradlab-added"></span>
    <button class="gradlab-toy-step" title="Add the next micro-batch's gradient; after the last, apply the update.">Step</button>
    <button class="gradlab-toy-play" title="Add one gradient after the other.">Play</button>
  </div>
  <canvas tabindex="0" role="application"
    aria-label="One update of the toy. The arrow keys move the starting point."></canvas>
  <div class="gradlab-key"></div>
  <div class="gradlab-key gradlab-toy-more">
    <label>rate <input type="range" class="gradlab-toy-rate" min="0.01" max="1" step="0.01"> <span></span></label>
    <button class="gradlab-toy-race" title="Three descents see the same micro-batches: k = 1, this k, and k = 1 at a k-th of the rate.">Race</button>
  </div>
  <span class="gradlab-unseen gradlab-words-toy" aria-live="polite"></span>`;

export function showOneUpdate({ model, el }) {
  el.classList.add("gradlab-view", "gradlab-view-toy");
  el.dataset.view = "toy";
  el.innerHTML = HTML;
  const find = (selector) => el.querySelector(selector);
  const canvas = find("canvas");
  const toy = toyOf(model);
  const begin = { update: model.get("looked_at"), added: Infinity }; // all micro-batches
  const state = { ...begin, k: 1, asked: 1, descent: null, race: null };
  const rate = find(".gradlab-toy-rate");
  rate.value = toy.learningRate;
  let timer = null;
  let frame = null;

  function compute() {
    const complete = state.added >= state.k;
    state.asked = model.get("accumulation_steps") * model.get("towers");
    state.k = Math.min(toy.most, state.asked);
    state.added = complete ? state.k : Math.min(state.added, state.k);
    state.descent = descend(toy, model.get("start"), state.k);
    if (state.race) state.race.runners = runners();
    schedule();
  }

  function runners() {
    return race(toy, model.get("start"), Math.max(2, state.k));
  }

  function startRace(on) {
    play(false);
    state.race = on ? { runners: runners(), seen: 0 } : null;
    find(".gradlab-toy-race").textContent = on ? "End race" : "Race";
    schedule();
  }

  /** What the race's colors mean, or the words of one update. */
  function key(colors) {
    if (!state.race) return [KEY];
    return state.race.runners.map(({ name }, i) => {
      const part = document.createElement("span");
      part.textContent = `● ${name}  `;
      part.style.color = raceColors(colors)[i];
      return part;
    });
  }

  /** Let the race go on with each frame. */
  function advance() {
    if (!state.race) return;
    const all = toy.updates * state.race.runners[1].steps;
    const going = state.race.seen < all;
    state.race.seen = Math.min(all, state.race.seen + all / FRAMES);
    el.dataset.race = going ? "running" : "finished";
    if (going) schedule();
  }

  function schedule() {
    frame = frame ?? requestAnimationFrame(draw);
  }

  function draw() {
    frame = null;
    const { context, width, height } = fitted(canvas);
    if (!width || !height) return; // hidden: the next resize draws
    const colors = looks(el);
    const valley = { width, height: 0.74 * height };
    context.save();
    context.beginPath();
    context.rect(0, 0, width, valley.height);
    context.clip();
    drawValley(context, valley, toy, state, colors);
    context.restore();
    drawLosses(context, { left: 38, width, top: valley.height + 8, height: 0.26 * height - 14 }, toy, state, colors);
    find(".gradlab-key").replaceChildren(...key(colors));
    find(".gradlab-toy-rate + span").textContent = toy.learningRate.toFixed(2);
    const done = state.k < state.asked ? "drawn" : "added"; // there is noise for the first ones only
    const added = state.added ? `${state.added} of ${state.asked} ${done}` : "applied";
    find(".gradlab-added").textContent = state.race ? "" : added;
    const start = model.get("start").map((weight) => weight.toFixed(2));
    Object.assign(el.dataset, { updates: state.update, added: state.added, steps: state.k, start });
    if (!state.race) delete el.dataset.race;
    advance();
    const moving = timer || el.dataset.race === "running";
    const words = state.race ? describeRace(state.race.runners) : describe(toy, state.descent, state.k, state.update);
    const said = find(".gradlab-words-toy");
    if (said.textContent !== (moving ? "" : words)) said.textContent = moving ? "" : words;
  }

  function step() {
    if (state.race) startRace(false);
    Object.assign(state, next(state, state.k, toy.updates));
    schedule();
  }

  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(step, Math.max(60, Math.min(400, 4000 / state.k))) : null;
    find(".gradlab-toy-play").textContent = on ? "Pause" : "Play";
    schedule();
  }

  function startAt(weights) {
    model.set("start", weights);
  }

  function setRate(value) {
    toy.learningRate = value;
    rate.value = value;
  }

  function reset({ start }) {
    Object.assign(state, begin);
    startRace(false);
    setRate(model.get("constants").learningRate);
    startAt(start);
    model.save_changes();
    model.send({ reset: true });
    compute();
  }

  let held = false;
  const box = () => [canvas.clientWidth, 0.74 * canvas.clientHeight];
  canvas.addEventListener("pointerdown", (event) => {
    const [x, y] = scales(...box()).toPixels(model.get("start"));
    held = Math.hypot(event.offsetX - x, event.offsetY - y) < REACH;
    if (held) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held) startAt(scales(...box()).toWeights([event.offsetX, event.offsetY]));
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, () => {
      if (held) model.save_changes();
      held = false;
    });
  }
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const { toPixels, toWeights } = scales(...box());
    startAt(toWeights(toPixels(model.get("start").map((weight, d) => weight + 0.25 * move[d]))));
    model.save_changes();
  });
  find(".gradlab-toy-step").addEventListener("click", () => {
    play(false);
    step();
  });
  find(".gradlab-toy-play").addEventListener("click", () => play(!timer));
  find(".gradlab-toy-race").addEventListener("click", () => startRace(!state.race));
  rate.addEventListener("input", () => {
    toy.learningRate = Number(rate.value);
    if (state.race) state.race.seen = 0;
    compute();
  });

  const names = ["accumulation_steps", "towers", "start"].map((name) => `change:${name}`);
  names.forEach((name) => model.on(name, compute));
  model.on("msg:custom", reset);
  const resized = new ResizeObserver(schedule);
  resized.observe(canvas);
  const themed = new MutationObserver(schedule); // JupyterLab names its theme in an attribute of the body
  themed.observe(document.body, { attributes: true });
  compute();
  return () => {
    play(false);
    names.forEach((name) => model.off(name, compute));
    model.off("msg:custom", reset);
    resized.disconnect();
    themed.disconnect();
  };
}

export default { render: showOneUpdate };
