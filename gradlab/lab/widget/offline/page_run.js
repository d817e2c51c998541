/** A run that a page trains by itself, in workers, and its numbers as the views draw them. */
import { COLUMNS, DOTS, dotsOf, pointOf, rowsOf } from "./run_rows.js";

/**
 * @typedef {Object} Trained What Python says of it.
 * @property {import("./training.js").Settings & {k: number}} settings
 * @property {number} updates The length of a run.
 * @property {number} evaluateEvery Updates after which the accuracy is measured.
 * @property {number} seeds
 * @property {number} trainingExamples
 * @property {number} testExamples
 * @property {string} digits As digits.py packs them, in base64.
 * @property {string} worker The source of digits.js and training.js.
 */

export const PACE = 150; // milliseconds between two drawings

let address = null; // of the worker's source, the same for all labs of a page

/** A worker for each seed. */
export class Workers {
  constructor(/** @type {Trained} */ page, take, fail) {
    address = address ?? URL.createObjectURL(new Blob([page.worker], { type: "text/javascript" }));
    this.all = Array.from({ length: page.seeds }, () => new Worker(address));
    const { updates, evaluateEvery, trainingExamples, testExamples } = page;
    this.job = { updates, evaluateEvery, trainingExamples, testExamples };
    this.all.forEach((worker) => {
      worker.onmessage = ({ data }) => take(data);
      worker.onerror = fail;
      worker.postMessage({ digits: page.digits }); // packed, so that the page stays quick
    });
  }

  begin(number, settings) {
    this.all.forEach((worker, seed) => worker.postMessage({ job: { ...this.job, ...settings, number, seed } }));
  }

  end() {
    this.all.forEach((worker) => worker.terminate());
  }

  pause(on) {
    this.all.forEach((worker) => worker.postMessage({ pause: on }));
  }
}

/** A run of this page: what was chosen, and the updates of each seed so far. */
export function newRun(number, settings, seeds) {
  return {
    number,
    settings,
    seeds: Array.from({ length: seeds }, () => []),
    training: seeds,
    state: "running",
    fault: null,
    drawn: null,
  };
}

export const countsOf = (run) => run.seeds.map(({ length }) => length);

/** A run as the views draw it, computed again when there is something new. */
export function drawn(run, style, name) {
  const counts = countsOf(run);
  if (String(run.drawn?.counts) !== String(counts)) {
    const { k, b } = run.settings;
    run.drawn = {
      number: run.number,
      k,
      b,
      batch: k * b,
      counts,
      columns: COLUMNS,
      rows: rowsOf(run.seeds, run.settings),
      dots: dotsOf(run.seeds[0], run.settings),
      perUpdate: Math.min(DOTS, k),
      point: Math.min(...counts) > 2 ? pointOf(run.seeds, run.settings) : null,
    };
  }
  return { ...run.drawn, style, name };
}
