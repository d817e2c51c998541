/** The numbers that the views draw of a run of this page, computed as chart_rows.py and curves.py do. */

export const COLUMNS = ["loss", "lossDeviation", "accuracy", "accuracyDeviation", "examples", "seconds", "noiseScale"];
const SMOOTHING = 0.95; // of the noise scale
const POINT_UPDATES = 8; // fewer say too little about the noise of a run
export const DOTS = 8; // at most so many micro-batches of an update are drawn

/**
 * @typedef {Object} Update What a worker says of an update.
 * @property {number[]} losses The mean loss of each micro-batch.
 * @property {number[]} norms The norm of each micro-batch's mean gradient.
 * @property {number} norm That of the window's.
 * @property {number} accuracy The share of the test examples; NaN where it was not measured.
 * @property {number} milliseconds
 */

const sum = (values) => values.reduce((one, other) => one + other, 0);
const meanOf = (values) => sum(values) / values.length;

/** The mean and the standard deviation of the values that are numbers; the deviation of a single one is 0. */
function meanAndDeviation(values) {
  const there = values.filter(Number.isFinite);
  const mean = meanOf(there);
  return [mean, Math.sqrt(sum(there.map((value) => (value - mean) ** 2)) / Math.max(1, there.length - 1))];
}

/** The running means of a seed's estimates: the gradient's variance between examples, and its squared norm. */
function smoothedEstimates(/** @type {Update[]} */ updates, { k, b }) {
  let [variance, squared, weight] = [0, 0, 0];
  return updates.map(({ norms, norm }) => {
    const small = meanOf(norms.map((each) => each ** 2));
    const big = norm ** 2;
    if (k > 1) {
      variance = SMOOTHING * variance + (1 - SMOOTHING) * (small - big) * k * b / (k - 1);
      squared = SMOOTHING * squared + (1 - SMOOTHING) * (k * big - small) / (k - 1);
      weight = SMOOTHING * weight + 1 - SMOOTHING;
    }
    return [variance / weight, squared / weight]; // NaN before the first one
  });
}

/** @returns {Float32Array} A row for each update, a number for each of COLUMNS, NaN where there is none. */
export function rowsOf(/** @type {Update[][]} */ seeds, settings) {
  const count = Math.max(0, ...seeds.map(({ length }) => length));
  const estimates = seeds.map((updates) => smoothedEstimates(updates, settings));
  const seconds = seeds.map(() => 0);
  const rows = new Float32Array(count * COLUMNS.length);
  for (let update = 0; update < count; update++) {
    const there = [...seeds.keys()].filter((seed) => update < seeds[seed].length);
    there.forEach((seed) => (seconds[seed] += seeds[seed][update].milliseconds / 1000));
    const of = (value) => meanAndDeviation(there.map((seed) => value(seeds[seed][update])));
    const sound = there.map((seed) => estimates[seed][update]).filter((found) => found.every(Number.isFinite));
    const [variance, squared] = [0, 1].map((part) => meanOf(sound.map((found) => found[part])));
    rows.set([
      ...of(({ losses }) => meanOf(losses)),
      ...of(({ accuracy }) => 100 * accuracy),
      (update + 1) * settings.k * settings.b,
      meanOf(there.map((seed) => seconds[seed])),
      squared > 0 ? variance / squared : NaN,
    ], update * COLUMNS.length);
  }
  return rows;
}

/** @returns {Float32Array} Losses of micro-batches of the first seed, evenly chosen: `perUpdate` for each update. */
export function dotsOf(/** @type {Update[]} */ updates, { k }) {
  const perUpdate = Math.min(DOTS, k);
  const chosen = Array.from({ length: perUpdate }, (_, i) => Math.floor(i * k / perUpdate));
  return Float32Array.from(updates.flatMap(({ losses }) => chosen.map((i) => losses[i])));
}

/** What is drawn of a run against k: `Point` of curves.py. A number that is not known is null, as Python sends it. */
export function pointOf(/** @type {Update[][]} */ seeds, { k, b, optimizer, learningRate }) {
  const differences = [];
  const spreads = [];
  for (const updates of seeds) {
    const means = updates.map(({ losses }) => meanOf(losses));
    for (let i = 2; i < means.length; i++) differences.push((means[i] - 2 * means[i - 1] + means[i - 2]) ** 2 / 6);
    if (k > 1) updates.forEach(({ losses }) => spreads.push(meanAndDeviation(losses)[1] ** 2));
  }
  const window = Math.sqrt(meanOf(differences));
  const microbatch = k > 1 ? Math.sqrt(meanOf(spreads)) : window;
  const times = seeds.flat().map(({ milliseconds }) => milliseconds).sort((one, other) => one - other);
  const middle = times.length / 2;
  const enough = seeds.every(({ length }) => length >= POINT_UPDATES);
  return {
    k,
    b,
    kind: `${optimizer} ${learningRate}`,
    window: enough ? window : null,
    microbatch,
    law: microbatch / Math.sqrt(k),
    milliseconds: (times[Math.ceil(middle - 1)] + times[Math.floor(middle)]) / 2,
  };
}
