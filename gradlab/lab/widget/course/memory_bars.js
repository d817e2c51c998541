/** memory_bars.py on a page without a kernel: the same arithmetic and the same drawing, which a test compares. */
import { escaped, grouped, liven } from "./saved_controls.js";

/**
 * @typedef {Object} Training As in memory_count.py, with the names of its fields.
 * @property {number} parameters
 * @property {number} activations
 * @property {number} reference_size
 * @property {number} size
 * @property {number} power
 * @property {number} layers
 * @property {number} microbatch_size
 * @property {number} accumulation_steps
 * @property {string} optimizer
 * @property {string} precision
 * @property {boolean} checkpointing
 * @property {number} zero_stage
 * @property {number} devices
 *
 * @typedef {Object} Facts What memory_bars.py says of them.
 * @property {Object<string, number>} optimizers Copies of the weights that each keeps.
 * @property {Object<string, number>} precisions Bytes of a number in the activations.
 * @property {Object<string, Training>} presets
 * @property {[Training, number][]} measured Trainings, and the MiB that a process held.
 * @property {string[]} colors Of the parts.
 * @property {Training} training What is shown at first.
 * @property {import("./saved_controls.js").Control[]} controls
 */

const MIB = 2 ** 20;
const mib = (number) => grouped(number / MIB);
const sum = (/** @type {number[]} */ numbers) => numbers.reduce((total, number) => total + number, 0);

/** The same effective batch, at once on each device. */
const whole = (/** @type {Training} */ t) => ({
  ...t,
  microbatch_size: t.microbatch_size * t.accumulation_steps,
  accumulation_steps: 1,
});

/** The bytes that one device holds, by part. */
function memory(/** @type {Training} */ t, /** @type {Facts} */ facts) {
  const copy = 4 * t.parameters;
  const shared = [0, 1, 2, 3].map((stage) => t.zero_stage >= stage ? copy / t.devices : copy);
  let numbers = t.activations * (t.size / t.reference_size) ** t.power;
  if (t.checkpointing) {
    const segments = Math.ceil(Math.sqrt(t.layers));
    numbers *= Math.min(1, (segments + t.layers / segments) / t.layers);
  }
  return {
    weights: shared[3],
    gradients: shared[2],
    accumulator: t.accumulation_steps > 1 ? shared[2] : 0,
    "optimizer state": facts.optimizers[t.optimizer] * shared[1],
    activations: t.microbatch_size * numbers * facts.precisions[t.precision],
  };
}

const total = (t, facts) => sum(Object.values(memory(t, facts)));

/** What to change first where accumulation does not fit. */
function advice(/** @type {Training} */ t, limit, facts) {
  if (total(t, facts) <= limit) return "Nothing needs to change.";
  let { microbatch_size: b, accumulation_steps: k } = t;
  while (b > 1 && b % 2 === 0) {
    [b, k] = [b / 2, k * 2];
    if (total({ ...t, microbatch_size: b, accumulation_steps: k }, facts) <= limit) {
      return `First make the micro-batches smaller: b = ${b} and k = ${k} fit.`;
    }
  }
  const stages = t.devices > 1 ? [1, 2, 3].filter((stage) => stage > t.zero_stage) : [];
  /** @type {[string, Partial<Training>][]} */
  const changes = [
    ["switch on activation checkpointing", { checkpointing: true }],
    ["compute in mixed precision", { precision: "mixed" }],
    ...stages.map((stage) => /** @type {[string, Partial<Training>]} */ ([
      `divide the state of the model, with ZeRO stage ${stage}`,
      { zero_stage: stage },
    ])),
    ["take an optimizer without state, SGD", { optimizer: "sgd" }],
    ["halve the size of the examples", { size: Math.max(1, Math.floor(t.size / 2)) }],
  ];
  const enough = changes.find(([, change]) => total({ ...t, ...change }, facts) <= limit);
  if (enough) return `First ${enough[0]}: then it fits.`;
  const [largest] = Object.entries(memory(t, facts)).reduce((most, part) => part[1] > most[1] ? part : most);
  return `No single change is enough. The largest part: ${largest}.`;
}

/** The totals, whether they fit, and what to do first if not. */
function sentence(/** @type {Training} */ t, limit, facts) {
  const { microbatch_size: b, accumulation_steps: k } = t;
  const [large, cut] = [total(whole(t), facts), total(t, facts)];
  const fits = (bytes) => bytes <= limit ? "fits" : "does not fit";
  return `On each device, one batch of ${grouped(b * k)} needs ${mib(large)} MiB and ${fits(large)} ` +
    `in ${mib(limit)} MiB. ${grouped(k)} micro-batches of ${grouped(b)} need ${mib(cut)} MiB: this ` +
    `${fits(cut)}. ${advice(t, limit, facts)}`;
}

/** The MiB that were measured for a training, or undefined. */
function measuredFor(/** @type {Training} */ t, /** @type {Facts} */ facts) {
  const found = facts.measured.find(([other]) => Object.keys(other).every((name) => other[name] === t[name]));
  return found?.[1];
}

function svg(/** @type {Training} */ t, limit, /** @type {Facts} */ facts) {
  /** @type {[string, Training][]} */
  const bars = [["one large batch", whole(t)], ["accumulation", t]];
  const marks = facts.measured.map(([, mebibytes]) => MIB * mebibytes);
  const most = 1.02 * Math.max(limit, ...bars.map(([, each]) => total(each, facts)), ...marks);
  const scale = 500 / most;
  const shapes = [];
  bars.forEach(([name, each], row) => {
    const top = 24 + 44 * row;
    let left = 130;
    shapes.push(`<text x="122" y="${top + 19}" text-anchor="end">${name}</text>`);
    Object.entries(memory(each, facts)).forEach(([part, number], at) => {
      const width = number * scale;
      const title = `<title>${part}: ${mib(number)} MiB</title>`;
      shapes.push(
        `<rect x="${left.toFixed(1)}" y="${top}" width="${width.toFixed(1)}" height="28" ` +
          `fill="${facts.colors[at]}">${title}</rect>`,
      );
      left += width;
    });
    const mark = measuredFor(each, facts);
    if (mark === undefined) return;
    const x = 130 + mark * MIB * scale;
    shapes.push(
      `<path d="M${x.toFixed(1)} ${top - 4}v36m-4 -36h8m-8 36h8" fill="none" stroke="currentColor" ` +
        `stroke-width="2"><title>measured: ${grouped(mark)} MiB</title></path>`,
    );
  });
  const x = 130 + limit * scale;
  shapes.push(
    `<path d="M${x.toFixed(1)} 16V106" stroke="currentColor" stroke-width="2" stroke-dasharray="5 4"/>` +
      `<text x="${x.toFixed(1)}" y="12" text-anchor="${x > 400 ? "end" : "middle"}">limit ${mib(limit)} MiB</text>`,
  );
  return `<svg viewBox="0 0 660 112" role="img" aria-label="${sentence(t, limit, facts)}" fill="currentColor" ` +
    `style="max-width: 52em; width: 100%; font: 13px sans-serif">${shapes.join("")}</svg>`;
}

/** The bars, the table that is their legend, and the sentence, as HTML. */
export function memoryPage(/** @type {Training} */ t, limit, /** @type {Facts} */ facts) {
  const each = [whole(t), t];
  const parts = each.map((training) => memory(training, facts));
  const swatch = (color) => `<span aria-hidden="true" style="color: ${color}">&#9632;</span> `;
  const row = (name, numbers) =>
    `<tr><th scope="row" style="text-align: left">${name}</th>` +
    numbers.map((number) => `<td style="text-align: right">${number}</td>`).join("") + "</tr>";
  const rows = Object.keys(parts[0]).map((part, at) =>
    row(swatch(facts.colors[at]) + part, parts.map((bytes) => mib(bytes[part])))
  );
  rows.push(row("total", each.map((training) => mib(total(training, facts)))));
  const marks = each.map((training) => measuredFor(training, facts));
  if (marks.some((mark) => mark !== undefined)) {
    rows.push(row("measured", marks.map((mark) => mark === undefined ? "" : grouped(mark))));
  }
  const heads = ["MiB on each device", "one large batch", "accumulation"].map((name) =>
    `<th scope="col" style="text-align: right">${name}</th>`
  );
  return `<div style="max-width: 52em">${svg(t, limit, facts)}` +
    `<table style="color: inherit; border-spacing: 14px 2px"><thead><tr>${heads.join("")}</tr></thead>` +
    `<tbody>${rows.join("")}</tbody></table><p aria-live="polite">${escaped(sentence(t, limit, facts))}</p></div>`;
}

/** Bars that follow their controls, in the place of their picture. */
export function showMemoryBars(/** @type {HTMLElement} */ root, /** @type {Facts} */ facts) {
  let training = facts.training;
  liven(root, facts.controls, ({ preset, limit_gib, ...values }, changed) => {
    training = changed === "preset" ? facts.presets[preset] : { ...training, ...values };
    return { html: memoryPage(training, limit_gib * 2 ** 30, facts), values: training };
  });
}
