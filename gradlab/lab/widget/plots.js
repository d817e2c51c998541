/**
 * The five views of a training as plots: what each of them draws, and how a plot is drawn.
 *
 * The first part is pure functions from numbers to plots, which the tests compare with Python. The second draws.
 */
import { line } from "./canvas.js";

/**
 * @typedef {Object} Run
 * @property {number} number The name by which Python knows it.
 * @property {string} name
 * @property {number | null} style An index into STYLES; null: a run of before, in grey.
 * @property {number} k Micro-batches of a window, on all towers.
 * @property {number} b Examples of a micro-batch.
 * @property {number} batch The effective batch.
 * @property {number[]} counts The updates of each seed so far.
 * @property {string[]} columns
 * @property {Float32Array} rows A row for each update, a number for each column.
 * @property {Float32Array} dots Losses of micro-batches, `perUpdate` for each update of the first seed.
 * @property {number} perUpdate
 */

/**
 * @typedef {Object} Data What the page knows.
 * @property {Run[]} runs Those that are not hidden.
 * @property {Run | null} current The run that is under way or was the last, unless it is hidden.
 * @property {Object[]} points Earlier runs, for the views against k.
 * @property {Object | null} point The same of the current run.
 * @property {(number | null)[]} window The losses of a window that is shown micro-batch by micro-batch.
 * @property {number} windowAt The updates before it.
 * @property {string} against
 * @property {{k: number, b: number, updates: number | null}} experiment
 */

/**
 * @typedef {Object} Plot
 * @property {Axis} x
 * @property {Axis} y
 * @property {Series[]} series
 * @property {number[][]} [dots]
 * @property {number[][]} [marked] Larger dots.
 * @property {{points: number[][], style: number | null, dash: number[]}[]} [lines] Lines that are not read.
 * @property {string} [note] Words in a corner.
 */

/**
 * @typedef {Object} Axis
 * @property {number} from
 * @property {number} to
 * @property {boolean} [log]
 * @property {number[]} [ticks]
 * @property {string} [label]
 * @property {function(number): string} say
 * @property {function(number): string} [brief] The same below a title that has the unit.
 * @property {number} [near] The share of the axis within which values are read together; 0: only at the same place.
 */

/**
 * @typedef {Object} Series
 * @property {string} name
 * @property {number | null} style null: grey.
 * @property {number[]} xs
 * @property {number[]} ys
 * @property {number[]} [band] Half the height of a band around the line.
 * @property {boolean} [points] Marks without a line.
 * @property {boolean} [marks] Marks on the line.
 */

const STEPS = [1, 2, 5, 10, 20, 50]; // ticks of k
const DRAWN = 1500; // more dots merge into one another
const AGAINST = {
  updates: { label: "updates", say: (x) => `update ${x}` },
  examples: { label: "training examples seen", say: (x) => `${plain(x)} examples`, near: 0.02 },
  seconds: { label: "training time (s)", say: (x) => `${x.toFixed(2)} s`, near: 0.02 },
};

/** A number in few digits: 0.0123, 12.3, 24,000. */
export function plain(value, digits = Math.abs(value) < 1000 ? 3 : 4) {
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumSignificantDigits: digits });
}

/** One column of a run's rows. */
export function column(/** @type {Run} */ run, name) {
  const [at, width] = [run.columns.indexOf(name), run.columns.length];
  return Array.from({ length: run.rows.length / width }, (_, update) => run.rows[update * width + at]);
}

/** Add what Python sent to a run, or make one: rows from `first` on replace what was there. */
export function merged(/** @type {Run | undefined} */ run, sent, columns, rows, dots) {
  const joined = (old, from, added) => {
    const kept = (old ?? new Float32Array(0)).subarray(0, from);
    const all = new Float32Array(kept.length + added.length);
    all.set(kept);
    all.set(added, kept.length);
    return all;
  };
  return {
    ...sent,
    columns,
    rows: joined(run?.rows, sent.first * columns.length, rows),
    dots: joined(run?.dots, sent.firstDot * sent.perUpdate, dots),
  };
}

/** The places where y is a number. */
function finite(name, style, xs, ys, more = {}) {
  const there = [...ys.keys()].filter((i) => Number.isFinite(ys[i]) && Number.isFinite(xs[i]));
  const pick = (values) => there.map((i) => values[i]);
  return { name, style, xs: pick(xs), ys: pick(ys), ...more, ...(more.band && { band: pick(more.band) }) };
}

const numbers = (/** @type {Run} */ run) =>
  Array.from({ length: run.rows.length / run.columns.length }, (_, i) => i + 1);
const most = (values, from = -Infinity) => values.reduce((one, other) => Math.max(one, other), from);
const least = (values, from = Infinity) => values.reduce((one, other) => Math.min(one, other), from);

function updatesAxis(/** @type {Data} */ { runs, experiment }) {
  const to = experiment.updates ?? most(runs.map((run) => run.rows.length / run.columns.length), 1);
  return { from: 0, to, ...AGAINST.updates };
}

/** @returns {Plot[]} The losses of the first seed's micro-batches, and the windows' mean over seeds with its band. */
export function losses(/** @type {Data} */ data) {
  const series = data.runs.map((run) =>
    finite(run.name, run.style, numbers(run), column(run, "loss"), { band: column(run, "lossDeviation") })
  );
  const highest = series.filter(({ ys }) => ys.length).map(({ ys }) => Math.min(most(ys), 4 * ys[0]));
  const dots = [];
  const marked = [];
  if (data.current) {
    const { perUpdate } = data.current;
    const skip = Math.max(1, Math.floor(data.current.dots.length / DRAWN));
    for (let i = 0; i < data.current.dots.length; i += skip) dots.push([(i + 0.5) / perUpdate, data.current.dots[i]]);
    data.window.forEach((loss, i) => {
      if (loss !== null) marked.push([data.windowAt + (i + 0.5) / data.window.length, loss]);
    });
  }
  const y = { from: 0, to: highest.length ? 1.25 * most(highest) : 3, say: (loss) => loss.toFixed(3) };
  return [{ x: updatesAxis(data), y, series, dots, marked }];
}

/** @returns {Plot[]} The test accuracy of all runs against updates, examples or seconds. */
export function accuracy(/** @type {Data} */ data) {
  const series = data.runs.map((run) => {
    const xs = data.against === "updates" ? numbers(run) : column(run, data.against);
    return finite(run.name, run.style, xs, column(run, "accuracy"), {
      band: column(run, "accuracyDeviation"),
      marks: true,
    });
  });
  const measured = series.flatMap(({ ys }) => ys);
  const from = measured.length ? most([0, 50, 80, 90].filter((low) => low <= least(measured))) : 0;
  const to = data.against === "updates" ? updatesAxis(data).to : most(series.flatMap(({ xs }) => xs), 0) || 1;
  return [{
    x: { from: 0, to, ...AGAINST[data.against] },
    y: { from, to: 100, say: (y) => `${y.toFixed(1)} %` },
    series,
  }];
}

function againstK(/** @type {Data} */ data) {
  const to = Math.max(60, data.experiment.k);
  return {
    from: 0.85,
    to,
    log: true,
    ticks: STEPS,
    label: "micro-batches of an update",
    say: (k) => `windows of ${k}`,
  };
}

/** Earlier runs as hollow grey points, and the current one, if it says enough. */
function pointsOf(/** @type {Data} */ data, earlier, now, value) {
  const of = (name, style, points) =>
    finite(name, style, points.map(({ k }) => k), points.map(value), { points: true });
  return [of("earlier", null, earlier), of(data.current?.name ?? "now", 0, now)];
}

/**
 * By what a change of k divided the noise, as predicted and as measured; null for runs that differ in more than k.
 * @param {Object} before A point.
 * @param {Object} now Another one.
 */
export function contrast(before, now) {
  if (!before?.window || !now?.window || before.k === now.k || before.b !== now.b || before.kind !== now.kind) {
    return null;
  }
  const [less, more] = before.k < now.k ? [before, now] : [now, before];
  const [predicted, measured] = [Math.sqrt(more.k / less.k), less.window / more.window].map((ratio) =>
    ratio.toFixed(1)
  );
  return { less, more, predicted, measured };
}

function noteOn(before, now) {
  const found = contrast(before, now);
  return found ? `÷ ${found.predicted} predicted, ÷ ${found.measured} measured` : "– –  noise of a micro-batch / √k";
}

/** @returns {Plot[]} The noise of the window's loss against k, and the law 1 / sqrt(k) for the last run. */
export function noise(/** @type {Data} */ data) {
  const earlier = data.points.filter(({ b }) => b === data.experiment.b);
  const now = data.current && data.point?.window ? [data.point] : []; // Python sends it when it says enough
  const last = now[0] ?? earlier.at(-1);
  const y = {
    from: last ? last.microbatch / 12 : 0.01,
    to: last ? last.microbatch * 2 : 1,
    log: true,
    say: (y) => `${y.toFixed(3)} nats`,
  };
  const law = last ? [0.85, 1000].map((k) => [k, last.microbatch / Math.sqrt(k)]) : [];
  return [{
    x: againstK(data),
    y,
    series: pointsOf(data, earlier, now, ({ window }) => window),
    lines: last ? [{ points: law, style: null, dash: [7, 3] }] : [],
    note: last ? noteOn(earlier.at(-1), now[0]) : "",
  }];
}

/** @returns {Plot[]} The gradient noise scale during training. Dotted: the effective batch. */
export function scale(/** @type {Data} */ data) {
  const x = updatesAxis(data);
  const runs = data.runs.filter(({ k }) => k > 1);
  const series = runs.map((run) => finite(run.name, run.style, numbers(run), column(run, "noiseScale")));
  const batches = runs.filter(({ style }) => style !== null);
  const lines = batches.map(({ batch, style }) => ({ points: [[x.from, batch], [x.to, batch]], style, dash: [2, 3] }));
  const seen = [...series.flatMap(({ ys }) => ys), ...runs.map(({ batch }) => batch)].filter((y) => y > 0);
  const [from, to] = seen.length ? [least(seen) / 1.3, most(seen) * 1.3] : [10, 1000];
  const note = data.experiment.k === 1 ? "needs k of 2 or more" : "···  effective batch";
  return [{ x, y: { from, to, log: true, say: (y) => `${plain(y)} examples`, brief: plain }, series, lines, note }];
}

/** @returns {Plot[]} The median time of an update against k. */
export function cost(/** @type {Data} */ data) {
  const now = data.current && data.point ? [data.point] : [];
  const series = pointsOf(data, data.points, now, ({ milliseconds }) => milliseconds);
  const highest = most(series.flatMap(({ ys }) => ys), 0);
  return [{ x: againstK(data), y: { from: 0, to: 1.2 * highest || 1, say: (y) => `${plain(y)} ms` }, series }];
}

export const VIEWS = {
  losses: {
    title: "training loss (nats)",
    plots: losses,
    about:
      "Dots: micro-batches of the first seed. Line and band: the mean over a window and one standard deviation over " +
      "the seeds. The loss is in nats, the unit of the natural logarithm: 2.3 is a guess among ten classes.",
  },
  noise: {
    title: "noise of the loss (nats)",
    plots: noise,
    about: "How much the loss of a window varies from update to update, one point for each run. If micro-batches are " +
      "independent, k of them have 1/√k of the noise of one: the dashed line.",
  },
  accuracy: {
    title: "test accuracy (%)",
    plots: accuracy,
    about:
      "The share of test images that are classified correctly: the mean over the seeds, and one standard deviation.",
  },
  scale: {
    title: "noise scale (examples)",
    plots: scale,
    about:
      "The batch at which the gradient has as much noise as signal. Far above it, larger batches save few updates.",
  },
  cost: { title: "time of an update (ms)", plots: cost, about: "The median over a run, one point for each run." },
};

/** The last values of the current run, as words for the head of a view. */
export function latest(/** @type {Data} */ data, /** @type {Plot[]} */ plots) {
  if (!data.current) return "";
  const values = plots.flatMap(({ series, y }) =>
    series.filter(({ style, ys }) => style === data.current.style && ys.length).map(({ ys }) =>
      (y.brief ?? y.say)(ys.at(-1))
    )
  );
  return values.join(" · ");
}

/**
 * A sentence for each run, for readers who cannot see the view.
 * @param {string} view
 * @param {Data} data
 * @param {Plot[]} plots Those of the view.
 */
export function words(view, data, plots) {
  const [lines, points] = [
    plots[0].series.filter(({ ys }) => ys.length),
    data.current && data.point ? [data.point] : [],
  ];
  const said = {
    losses: () => lines.map(({ name, ys }) => `${name}: from ${ys[0].toFixed(2)} to ${ys.at(-1).toFixed(2)} nats`),
    accuracy: () =>
      lines.map(({ name, xs, ys }) =>
        `${name}: ${ys.at(-1).toFixed(1)} % after ${plain(xs.at(-1), 4)} ${data.against}`
      ),
    noise: () =>
      plots[0].series[1].ys.map((y) =>
        `windows of ${data.point.k}: ${y.toFixed(3)} nats measured, ${data.point.law.toFixed(3)} predicted by 1/√k`
      ),
    scale: () => lines.map(({ name, ys }) => `${name}: ${plain(ys.at(-1))} examples`),
    cost: () => points.map(({ milliseconds }) => `an update takes ${milliseconds.toFixed(1)} ms`),
  }[view]();
  return `${VIEWS[view].title}${said.length ? `. ${said.join(". ")}.` : ": no data yet."}`;
}

/** What a plot shows nearest to a place on its horizontal axis: that place, and the value of each series there. */
export function nearest(/** @type {Plot} */ plot, x) {
  const at = plot.x.log ? Math.log : (value) => value;
  const closest = (xs, place) =>
    xs.reduce((best, each, i) => (Math.abs(at(each) - at(place)) < Math.abs(at(xs[best]) - at(place)) ? i : best), 0);
  const some = plot.series.filter(({ xs }) => xs.length);
  if (!some.length) return null;
  const places = some.map(({ xs }) => xs[closest(xs, x)]);
  const place = places[closest(places, x)];
  const near = (plot.x.near ?? 0) * (plot.x.to - plot.x.from);
  const values = some
    .map(({ name, style, xs, ys }) => ({ name, style, i: closest(xs, place), xs, ys }))
    .filter(({ i, xs }) => Math.abs(at(xs[i]) - at(place)) <= near)
    .map(({ name, style, i, ys }) => ({ name, style, y: ys[i], said: plot.y.say(ys[i]) }));
  return { x: place, said: plot.x.say(place), values };
}

/** The place after this one, in the direction of a key: the next of all places where a series has a value. */
export function stepped(/** @type {Plot} */ plot, x, step) {
  const all = [...new Set(plot.series.flatMap(({ xs }) => xs))].sort((a, b) => a - b);
  const shown = all.filter((place) => place >= plot.x.from && place <= plot.x.to);
  if (!shown.length) return null;
  const here = x === null ? (step > 0 ? -1 : shown.length) : shown.indexOf(nearest(plot, x).x);
  return shown[Math.max(0, Math.min(shown.length - 1, here + step))];
}

/** Round numbers along an axis, at most about five. */
export function ticksOf(/** @type {Axis} */ { from, to, log, ticks }) {
  if (ticks) return ticks.filter((tick) => tick >= from && tick <= to);
  if (log) {
    const powers = Array.from({ length: 40 }, (_, i) => 10 ** (i - 20));
    const [many, few] = [[1, 2, 5], [1]].map((subs) =>
      powers.flatMap((power) => subs.map((sub) => sub * power)).filter((tick) => tick >= from && tick <= to)
    );
    return many.length > 6 && few.length > 1 ? few : many;
  }
  const rough = (to - from) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((each) => each * power >= rough * 0.999);
  return Array.from({ length: 8 }, (_, i) => (Math.ceil(from / step - 1e-9) + i) * step).filter((tick) =>
    tick <= to * 1.0001
  );
}

/** Colors that color-blind readers can tell apart, also by dash and mark: Okabe and Ito (2008), as in style.py. */
export const STYLES = [
  { light: "#0072B2", dark: "#56B4E9", dash: [], mark: "●" },
  { light: "#D55E00", dark: "#E8813A", dash: [6, 3], mark: "■" },
  { light: "#009E73", dark: "#2BBF93", dash: [6, 2, 1.5, 2], mark: "▲" },
  { light: "#E69F00", dark: "#E69F00", dash: [1.5, 2.5], mark: "◆" },
  { light: "#CC79A7", dark: "#CC79A7", dash: [6, 2, 1.5, 2, 1.5, 2], mark: "▼" },
  { light: "#56B4E9", dark: "#0A86CC", dash: [2, 2], mark: "✚" },
  { light: "#000000", dark: "#FFFFFF", dash: [10, 3], mark: "✖" },
];

/** The style of a run: the first belongs to the current run, the others to pinned runs, over and over. */
export function styleOf(place) {
  return place < STYLES.length ? place : 1 + ((place - 1) % (STYLES.length - 1));
}

/** The color of a style on the page's ground. */
export function colorOf(style, colors) {
  return style === null ? colors.soft : STYLES[style][colors.dark ? "dark" : "light"];
}

/** Functions from values to pixels for a plot in a box, and back along x. */
export function places(/** @type {Plot} */ plot, { left, top, width, height }) {
  const share = (/** @type {Axis} */ { from, to, log }, value) =>
    log ? Math.log(value / from) / Math.log(to / from) : (value - from) / (to - from);
  return {
    x: (value) => left + share(plot.x, value) * width,
    y: (value) => top + (1 - share(plot.y, value)) * height,
    valueAt: (pixel) => {
      const part = (pixel - left) / width;
      const { from, to, log } = plot.x;
      return log ? from * (to / from) ** part : from + part * (to - from);
    },
  };
}

/** The boxes of plots that stand one above the other, without their labels. */
export function boxes(count, width, height) {
  const [left, right, bottom, gap] = [40, 8, 32, 10];
  const top = 8; // half a label
  const each = (height - bottom - top - gap * (count - 1)) / count;
  return Array.from(
    { length: count },
    (_, i) => ({ left, top: top + i * (each + gap), width: width - left - right, height: each }),
  );
}

function drawAxes(context, plot, box, { x, y }, colors) {
  const [right, bottom] = [box.left + box.width, box.top + box.height];
  Object.assign(context, { fillStyle: colors.soft, font: colors.font, textBaseline: "middle", textAlign: "right" });
  for (const tick of ticksOf(plot.y)) {
    line(context, [[box.left, y(tick)], [right, y(tick)]], colors.faint, 0.5);
    context.fillText(plain(tick), box.left - 5, y(tick));
  }
  context.textAlign = "center";
  for (const tick of ticksOf(plot.x)) {
    line(context, [[x(tick), bottom], [x(tick), bottom + 3]], colors.soft, 0.8);
    context.fillText(plain(tick), Math.min(x(tick), right - 4), bottom + 10);
  }
  line(context, [[box.left, box.top], [box.left, bottom], [right, bottom]], colors.soft, 0.8);
  if (plot.x.label) context.fillText(plot.x.label, box.left + box.width / 2, bottom + 24);
  if (!plot.y.label) return;
  context.textAlign = "left";
  context.fillText(plot.y.label, box.left + 4, box.top + 6);
}

/** As many of a series' values as its box can show: two for each pixel of its width. */
function thinned(/** @type {Series} */ series, width) {
  const skip = Math.ceil(series.xs.length / (2 * width));
  if (skip < 2 || series.points) return series;
  const pick = (values) => values?.filter((_, i) => i % skip === 0 || i === values.length - 1);
  return { ...series, xs: pick(series.xs), ys: pick(series.ys), band: pick(series.band) };
}

function drawSeries(context, series, { x, y }, colors) {
  const { style, xs, ys } = series;
  const color = colorOf(style, colors);
  const points = xs.map((each, i) => [x(each), y(ys[i])]);
  if (series.band) {
    const edge = (sign) => xs.map((each, i) => [x(each), y(ys[i] + sign * series.band[i])]);
    context.beginPath();
    [...edge(1), ...edge(-1).reverse()].forEach(([px, py], i) => (i ? context.lineTo(px, py) : context.moveTo(px, py)));
    Object.assign(context, { fillStyle: color, globalAlpha: 0.18 });
    context.fill();
    context.globalAlpha = 1;
  }
  if (!series.points) line(context, points, color, 1.8, style === null ? [3, 3] : STYLES[style].dash);
  if (series.points || series.marks) {
    const every = series.points ? 1 : Math.max(1, Math.floor(points.length / 10));
    points.forEach((point, i) => i % every === 0 && drawMark(context, point, style, color, series.points ? 5.5 : 3.5));
  }
}

function drawMark(context, [x, y], style, color, radius) {
  context.beginPath();
  if (style === null) { // an earlier run: hollow
    context.arc(x, y, 3.5, 0, 2 * Math.PI);
    Object.assign(context, { strokeStyle: color, lineWidth: 1.2 });
    context.stroke();
    return;
  }
  if (STYLES[style].mark === "✚" || STYLES[style].mark === "✖") {
    const [along, across] = STYLES[style].mark === "✚"
      ? [[radius, 0], [0, radius]]
      : [[radius, radius], [radius, -radius]];
    for (const [dx, dy] of [along, across]) line(context, [[x - dx, y - dy], [x + dx, y + dy]], color, 2.5);
    return;
  }
  const turn = { "■": [4, 0.25], "▲": [3, -0.25], "◆": [4, 0], "▼": [3, 0.25] }[STYLES[style].mark];
  if (turn) {
    const [corners, from] = turn;
    for (let i = 0; i < corners; i++) {
      const angle = 2 * Math.PI * (i / corners + from / (corners === 4 ? 2 : 1));
      context.lineTo(x + 1.3 * radius * Math.cos(angle), y + 1.3 * radius * Math.sin(angle));
    }
  } else context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fillStyle = color;
  context.fill();
}

/** Draw a plot; `cursor`: the place on the horizontal axis that is read, or null. */
export function drawPlot(context, /** @type {Plot} */ plot, box, colors, cursor) {
  const to = places(plot, box);
  drawAxes(context, plot, box, to, colors);
  context.save();
  context.beginPath();
  context.rect(box.left - 4, box.top - 4, box.width + 8, box.height + 8);
  context.clip();
  Object.assign(context, { fillStyle: colors.path, globalAlpha: 0.35 });
  for (const [x, y] of plot.dots ?? []) context.fillRect(to.x(x) - 0.8, to.y(y) - 0.8, 1.6, 1.6);
  context.globalAlpha = 1;
  for (const { points, style, dash } of plot.lines ?? []) {
    line(
      context,
      points.map(([x, y]) => [to.x(x), to.y(y)]),
      style === null ? colors.text : colorOf(style, colors),
      1.2,
      dash,
    );
  }
  [...plot.series].reverse().forEach((series) => drawSeries(context, thinned(series, box.width), to, colors));
  for (const [x, y] of plot.marked ?? []) drawMark(context, [to.x(x), to.y(y)], 1, colorOf(1, colors), 4);
  const read = cursor === null ? null : nearest(plot, cursor);
  if (read) {
    line(context, [[to.x(read.x), box.top], [to.x(read.x), box.top + box.height]], colors.soft, 1);
    for (const { style, y } of read.values) {
      drawMark(context, [to.x(read.x), to.y(y)], style, colorOf(style, colors), 3.5);
    }
  }
  context.restore();
  if (!plot.note) return;
  Object.assign(context, { fillStyle: colors.soft, font: colors.font, textBaseline: "bottom", textAlign: "left" });
  context.fillText(plot.note, box.left + 6, box.top + box.height - 4);
}
