/** timeline.py on a page without a kernel: the same schedules and the same drawing, which a test compares. */
import { escaped, liven, short } from "./saved_controls.js";

/**
 * @typedef {{kind: string, microbatch: number}} Step
 * @typedef {Step & {device: number, start: number, end: number}} Task
 *
 * @typedef {Object} Times The arguments of schedules.schedule.
 * @property {string} name
 * @property {number} devices
 * @property {number} microbatches
 * @property {number} forward
 * @property {number} backward
 * @property {number} all_reduce
 *
 * @typedef {Object} Facts What timeline.py says of them.
 * @property {Object<string, string>} names What each schedule is called.
 * @property {string[]} pipelines Names of schedules.
 * @property {number} forward Seconds of a micro-batch's forward pass through the whole network.
 * @property {Object<string, string>} fills The color of each kind of step.
 * @property {Object<string, string>} inks The color of the numbers in a box, where it has any.
 * @property {string} hatch
 * @property {Object<string, number>} sizes Of the drawing: width, left, right, row, box.
 * @property {import("./saved_controls.js").Control[]} controls
 */

/** The steps of a device, in order. */
function orderOf({ name, devices, microbatches, all_reduce }, stage, pipeline) {
  const numbers = Array.from({ length: microbatches }, (_, at) => at + 1);
  const step = (kind, microbatch) => ({ kind, microbatch });
  if (!pipeline) {
    const reduces = (number) => all_reduce > 0 && (name === "each" || number === microbatches);
    return numbers.flatMap((number) => [
      step("forward", number),
      step("backward", number),
      ...(reduces(number) ? [step("all-reduce", number)] : []),
    ]);
  }
  const ahead = name === "gpipe" ? microbatches : Math.min(devices - stage, microbatches);
  return [
    ...numbers.slice(0, ahead).map((number) => step("forward", number)),
    ...numbers.flatMap((number) => [
      step("backward", number),
      ...(number + ahead <= microbatches ? [step("forward", number + ahead)] : []),
    ]),
  ];
}

/** The steps that must have ended before a step of a device, as [device, kind, micro-batch]. */
function needsOf(device, { kind, microbatch }, devices, pipeline) {
  const before = (each, what) => [each, what, microbatch];
  if (!pipeline) {
    return kind === "all-reduce" ? Array.from({ length: devices }, (_, each) => before(each, "backward")) : [];
  }
  if (kind === "forward") return device ? [before(device - 1, kind)] : [];
  return [before(device, "forward"), ...(device + 1 < devices ? [before(device + 1, kind)] : [])];
}

/** All tasks of an update: each device's steps in order, each as early as possible. */
function simulate(/** @type {Times} */ times, pipeline) {
  const { devices } = times;
  const seconds = { forward: times.forward, backward: times.backward, "all-reduce": times.all_reduce };
  const orders = Array.from({ length: devices }, (_, stage) => orderOf(times, stage, pipeline));
  const ends = new Map();
  const free = orders.map(() => 0);
  const done = orders.map(() => 0);
  const tasks = [];
  const total = orders.flat().length;
  while (tasks.length < total) {
    const before = tasks.length;
    orders.forEach((order, device) => {
      for (const step of order.slice(done[device])) {
        const needed = needsOf(device, step, devices, pipeline).map((each) => ends.get(String(each)));
        if (needed.includes(undefined)) break;
        const start = Math.max(free[device], ...needed);
        free[device] = start + seconds[step.kind];
        ends.set(String([device, step.kind, step.microbatch]), free[device]);
        tasks.push({ ...step, device, start, end: free[device] });
        done[device] += 1;
      }
    });
    if (tasks.length === before) throw new Error("steps wait for each other");
  }
  return tasks;
}

/** The most micro-batches whose activations a device holds at a time. */
function heldBy(/** @type {Task[]} */ tasks, device) {
  let held = 0;
  let most = 0;
  for (const { kind } of tasks.filter((task) => task.device === device)) {
    if (kind === "forward") held += 1;
    most = Math.max(most, held);
    if (kind === "backward") held -= 1;
  }
  return most;
}

/** The formula of the idle share, and its value. */
function expected({ name, devices: p, microbatches: m, forward, backward, all_reduce }, pipeline) {
  if (pipeline) return ["(p - 1) / (m + p - 1)", (p - 1) / (m + p - 1)];
  const computed = forward + backward;
  const meaning = `with an all-reduce of a = ${short(all_reduce)} s`;
  return name === "window"
    ? [`a / (m (f + b) + a) ${meaning}`, all_reduce / (m * computed + all_reduce)]
    : [`a / (f + b + a) ${meaning}`, all_reduce / (computed + all_reduce)];
}

/** The numbers of an update in sentences. */
function describe(/** @type {Times} */ times, /** @type {Task[]} */ tasks, pipeline, /** @type {Facts} */ facts) {
  const { name, devices: p, microbatches: m } = times;
  const seconds = Math.max(...tasks.map(({ end }) => end));
  const computing = tasks.filter(({ kind }) => kind !== "all-reduce");
  const idle = 1 - computing.reduce((total, { start, end }) => total + end - start, 0) / (p * seconds);
  const examples = pipeline ? m : p * m;
  const held = Array.from({ length: p }, (_, device) => heldBy(tasks, device));
  const most = Math.max(...held);
  const layers = !pipeline || p === 1 ? "all layers" : `1/${p} of the layers`;
  const where = pipeline ? `device ${held.indexOf(most) + 1}` : "each device";
  const count = (number) => `${number} micro-batch${number > 1 ? "es" : ""}`;
  const percent = (share) => `${(100 * share).toFixed(1)}%`;
  const [formula, value] = expected(times, pipeline);
  const words = facts.names[name];
  return [
    `${words[0].toUpperCase()}${words.slice(1)}: p = ${p}, m = ${m}.`,
    `Time of an update: ${short(seconds)} s for ${count(examples)} (${(examples / seconds).toFixed(1)} a second).`,
    `Time in which devices compute nothing: ${percent(Math.abs(idle))}. Formula: ${formula}: ${percent(value)}.`,
    `Activations held at most: ${count(most)}, of ${layers} (${where}).`,
  ];
}

const text = (x, y, words, anchor = "start", fill = "") =>
  `<text x="${x.toFixed(1)}" y="${y}" text-anchor="${anchor}"${fill && ` fill="${fill}"`}>${words}</text>`;

/** Diagonal lines that fill a box. */
function hatching(x, y, width, /** @type {Facts} */ { hatch, sizes: { box } }) {
  const lines = [];
  for (let along = 6; along < width + box; along += 6) {
    const right = Math.min(along, width);
    const left = Math.max(along - box, 0);
    lines.push(
      `M${(x + right).toFixed(1)} ${(y + along - right).toFixed(1)}` +
        `L${(x + left).toFixed(1)} ${(y + along - left).toFixed(1)}`,
    );
  }
  return `<path d="${lines.join("")}" stroke="${hatch}" stroke-width="2.5" fill="none"/>`;
}

function boxOf(kind, x, y, width, /** @type {Facts} */ facts) {
  const place = `x="${x.toFixed(1)}" y="${y}" width="${width.toFixed(1)}" height="${facts.sizes.box}"`;
  if (kind in facts.inks) {
    return `<rect class="${kind}" ${place} fill="${facts.fills[kind]}" stroke="currentColor"/>`;
  }
  return `<rect ${place} fill="${facts.fills[kind]}"/>${hatching(x, y, width, facts)}` +
    `<rect class="${kind}" ${place} fill="none" stroke="currentColor"/>`;
}

function legend(/** @type {Task[]} */ tasks, /** @type {Facts} */ facts) {
  const kinds = Object.keys(facts.fills).filter((kind) => tasks.some((task) => task.kind === kind));
  const { left, box } = facts.sizes;
  const parts = kinds.map((kind, at) =>
    boxOf(kind, left + 115 * at, 0, 28, facts) + text(left + 115 * at + 35, 15, kind)
  );
  const x = left + 115 * kinds.length;
  return `${parts.join("")}<rect x="${x}" y="0" width="28" height="${box}" fill-opacity="0.12"/>${
    text(x + 35, 15, "idle")
  }`;
}

/** The axis of time, with a tick at multiples of 1, 2 or 5 times a power of ten. */
function axis(longest, top, scale, left) {
  const power = 10 ** Math.floor(Math.log10(longest / 8));
  const step = [1, 2, 5, 10, 20].map((factor) => factor * power).find((each) => longest / each <= 10);
  const ticks = Array.from({ length: Math.floor(longest / step * (1 + 1e-9)) + 1 }, (_, number) => {
    const x = left + number * step * scale;
    const words = String(Number((number * step).toFixed(9)));
    return `<path d="M${x.toFixed(1)} ${top}v4" stroke="currentColor"/>${text(x, top + 17, words, "middle")}`;
  });
  const end = left + longest * scale;
  return `<path d="M${left} ${top}H${end.toFixed(1)}" stroke="currentColor"/>${ticks.join("")}${
    text(left + longest * scale / 2, top + 34, "time in seconds", "middle")
  }`;
}

function draw(/** @type {Times} */ times, /** @type {Task[]} */ tasks, /** @type {Facts} */ facts) {
  const { width, left, right, row, box } = facts.sizes;
  const longest = Math.max(...tasks.map(({ end }) => end));
  const scale = (width - left - right) / longest;
  const top = 34;
  const room = 7 * String(times.microbatches).length + 2; // px for a number
  const rows = Array.from({ length: times.devices }, (_, device) => {
    const y = top + row * device;
    const ground = `<rect x="${left}" y="${y}" width="${(longest * scale).toFixed(1)}" height="${box}" ` +
      `fill-opacity="0.12"/>`;
    const boxes = tasks.filter((task) => task.device === device).map(({ kind, microbatch, start, end }) => {
      const x = left + start * scale;
      const wide = (end - start) * scale;
      const number = kind in facts.inks && wide > room;
      return boxOf(kind, x, y, wide, facts) +
        (number ? text(x + wide / 2, y + 15, String(microbatch), "middle", facts.inks[kind]) : "");
    });
    return text(left - 8, y + 15, `device ${device + 1}`, "end") + ground + boxes.join("");
  });
  const below = top + row * times.devices + 8;
  const label = `Timeline of one update: ${facts.names[times.name]}, ${times.devices} devices.`;
  return `<svg role="img" aria-label="${label}" viewBox="0 0 ${width} ${below + 40}" ` +
    `style="width: 100%; max-width: ${width}px; height: auto; display: block" font-family="sans-serif" ` +
    `font-size="12" fill="currentColor" stroke-width="1">${legend(tasks, facts)}${rows.join("")}` +
    `${axis(longest, below, scale, left)}</svg>`;
}

/** The drawing of the settings, and its words, as HTML. */
export function timelinePage(values, /** @type {Facts} */ facts) {
  const { schedule, devices, microbatches, backward, megabytes, gigabits } = values;
  const pipeline = facts.pipelines.includes(schedule);
  const forward = pipeline ? facts.forward / devices : facts.forward;
  const sent = 2 * (devices - 1) / devices * 1e6 * megabytes / (1e9 / 8 * gigabits);
  const times = {
    name: schedule,
    devices,
    microbatches,
    forward,
    backward: backward * forward,
    all_reduce: pipeline ? 0 : sent,
  };
  const tasks = simulate(times, pipeline);
  const words = describe(times, tasks, pipeline, facts).map(escaped).join("<br>");
  return `<div>${draw(times, tasks, facts)}<div role="status">${words}</div></div>`;
}

/** A timeline that follows its controls, in the place of its picture. */
export function showTimeline(/** @type {HTMLElement} */ root, /** @type {Facts} */ facts) {
  liven(root, facts.controls, (values) => ({
    html: timelinePage(values, facts),
    unused: facts.pipelines.includes(values.schedule) ? ["megabytes", "gigabits"] : [],
  }));
}
