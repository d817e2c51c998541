/**
 * Trains the dense network of the lab (models.py) in a page: 784 inputs, 128 relu units, 10 classes.
 *
 * The first part is pure functions and a class, which the tests compare with TensorFlow. Weights, gradients and what an
 * optimizer keeps are float32, as there. The second part is a worker, which trains some seeds and posts what it did.
 */

import { digitsOf } from "./digits.js";

const [INPUTS, UNITS, CLASSES] = [784, 128, 10];

// Where each part begins in an array of all weights, which ends with the biases of the logits.
const HIDDEN_BIASES = INPUTS * UNITS;
const KERNEL = HIDDEN_BIASES + UNITS;
const BIASES = KERNEL + UNITS * CLASSES;
const WEIGHTS = BIASES + CLASSES;

const TOGETHER = 4; // pixels that one pass over the units takes, of which each image has a multiple

/** @typedef {import("./digits.js").Digits} Digits */

/**
 * @typedef {Object} Settings
 * @property {number} b Examples of a micro-batch.
 * @property {number} learningRate
 * @property {string} optimizer "sgd", "momentum", "adam" or "adamw".
 */

/** Random numbers from 0 to 1, the same ones for the same seed in every browser: mulberry32. */
export function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = state + 0x6d2b79f5 >>> 0;
    let mixed = Math.imul(state ^ state >>> 15, state | 1);
    mixed ^= mixed + Math.imul(mixed ^ mixed >>> 7, mixed | 61);
    return ((mixed ^ mixed >>> 14) >>> 0) / 2 ** 32;
  };
}

/** Glorot-uniform kernels (Glorot and Bengio 2010, equation 16) and zero biases. */
export function initialWeights(random) {
  const weights = new Float32Array(WEIGHTS);
  const draw = (from, to, ends) => {
    const limit = Math.sqrt(6 / ends);
    for (let i = from; i < to; i++) weights[i] = limit * (2 * random() - 1);
  };
  draw(0, HIDDEN_BIASES, INPUTS + UNITS);
  draw(KERNEL, BIASES, UNITS + CLASSES);
  return weights;
}

/** Computes losses and gradients at weights that it does not change. */
class Network {
  constructor(/** @type {Digits} */ digits) {
    this.digits = digits;
    this.units = new Float32Array(UNITS); // before the relu
    this.active = new Uint8Array(UNITS); // the units above 0 come first
    this.count = 0; // of these
    this.logits = new Float64Array(CLASSES);
    this.slopes = new Float32Array(UNITS); // of the loss, by the active units
  }

  /** The loss of an example in nats. Leaves the units and, in the place of the logits, the probabilities. */
  loss(/** @type {Float32Array} */ weights, example) {
    const { units, active, logits } = this;
    const { begins, pixels, levels, classes } = this.digits;
    units.set(weights.subarray(HIDDEN_BIASES, KERNEL));
    for (let i = begins[example]; i < begins[example + 1]; i += TOGETHER) {
      const one = UNITS * pixels[i], two = UNITS * pixels[i + 1];
      const three = UNITS * pixels[i + 2], four = UNITS * pixels[i + 3];
      const first = levels[i], second = levels[i + 1], third = levels[i + 2], fourth = levels[i + 3];
      for (let unit = 0; unit < UNITS; unit++) {
        units[unit] += first * weights[one + unit] + second * weights[two + unit] + third * weights[three + unit] +
          fourth * weights[four + unit];
      }
    }
    for (let c = 0; c < CLASSES; c++) logits[c] = weights[BIASES + c];
    let count = 0;
    for (let unit = 0; unit < UNITS; unit++) {
      const value = units[unit];
      if (value <= 0) continue;
      active[count++] = unit;
      const row = KERNEL + unit * CLASSES;
      for (let c = 0; c < CLASSES; c++) logits[c] += value * weights[row + c];
    }
    this.count = count;
    const highest = logits.reduce((one, other) => Math.max(one, other));
    const right = logits[classes[example]] - highest;
    let sum = 0;
    for (let c = 0; c < CLASSES; c++) sum += logits[c] = Math.exp(logits[c] - highest);
    for (let c = 0; c < CLASSES; c++) logits[c] /= sum;
    return Math.log(sum) - right;
  }

  /**
   * Add the gradient of an example's loss to a sum, and note the pixels whose part of the sum was changed.
   * @returns {number} The loss.
   */
  addGradient(
    /** @type {Float32Array} */ weights,
    example,
    /** @type {Float32Array} */ sum,
    /** @type {Uint8Array} */ changed,
  ) {
    const { units, active, logits, slopes } = this;
    const { begins, pixels, levels, classes } = this.digits;
    const loss = this.loss(weights, example);
    const count = this.count;
    logits[classes[example]] -= 1; // now the slopes of the loss by the logits
    for (let c = 0; c < CLASSES; c++) sum[BIASES + c] += logits[c];
    for (let i = 0; i < count; i++) {
      const unit = active[i];
      const value = units[unit];
      let slope = 0;
      const row = KERNEL + unit * CLASSES;
      for (let c = 0; c < CLASSES; c++) {
        sum[row + c] += value * logits[c];
        slope += weights[row + c] * logits[c];
      }
      slopes[unit] = slope;
      sum[HIDDEN_BIASES + unit] += slope;
    }
    for (let i = begins[example]; i < begins[example + 1]; i += TOGETHER) {
      const one = UNITS * pixels[i], two = UNITS * pixels[i + 1];
      const three = UNITS * pixels[i + 2], four = UNITS * pixels[i + 3];
      const first = levels[i], second = levels[i + 1], third = levels[i + 2], fourth = levels[i + 3];
      for (let j = 0; j < count; j++) {
        const unit = active[j];
        const slope = slopes[unit];
        sum[one + unit] += first * slope;
        sum[two + unit] += second * slope;
        sum[three + unit] += third * slope;
        sum[four + unit] += fourth * slope;
      }
      for (let at = i; at < i + TOGETHER; at++) changed[pixels[at]] = 1;
    }
    return loss;
  }
}

/** Steps of the optimizers, with the settings of optimizers.py: functions (weights, gradient, rate, count of updates). */
const OPTIMIZERS = {
  sgd: () => (weights, gradient, rate) => {
    for (let i = 0; i < WEIGHTS; i++) weights[i] -= rate * gradient[i];
  },
  momentum: () => {
    const velocity = new Float32Array(WEIGHTS);
    return (weights, gradient, rate) => {
      for (let i = 0; i < WEIGHTS; i++) {
        velocity[i] = 0.9 * velocity[i] - rate * gradient[i];
        weights[i] += velocity[i];
      }
    };
  },
  adam: () => adam(0),
  adamw: () => adam(0.004),
};

function adam(decay) {
  const mean = new Float32Array(WEIGHTS);
  const square = new Float32Array(WEIGHTS);
  return (weights, gradient, rate, count) => {
    const step = rate * Math.sqrt(1 - 0.999 ** count) / (1 - 0.9 ** count);
    for (let i = 0; i < WEIGHTS; i++) {
      const slope = gradient[i];
      mean[i] += 0.1 * (slope - mean[i]);
      square[i] += 0.001 * (slope * slope - square[i]);
      weights[i] -= rate * decay * weights[i] + step * mean[i] / (Math.sqrt(square[i]) + 1e-8);
    }
  };
}

/** One training, from one seed. */
export class Training {
  /**
   * @param {Digits} digits
   * @param {Settings} settings
   * @param {Float32Array} weights They are changed.
   */
  constructor(digits, settings, weights) {
    this.network = new Network(digits);
    this.settings = settings;
    this.weights = weights;
    this.apply = OPTIMIZERS[settings.optimizer]();
    this.updates = 0;
    this.microbatch = new Float32Array(WEIGHTS); // the sum of the gradients of a micro-batch's examples
    this.window = new Float32Array(WEIGHTS); // of all examples so far
    this.changed = new Uint8Array(INPUTS);
  }

  /**
   * Make one update: accumulate the gradients of micro-batches, and apply their mean over the window's examples once.
   * @param {Uint32Array} examples Those of the window. The last micro-batch has what is left.
   * @returns The mean loss and the norm of the mean gradient of each micro-batch, and the norm of the window's.
   */
  update(examples) {
    const { b, learningRate } = this.settings;
    const losses = [];
    const norms = [];
    for (let first = 0; first < examples.length; first += b) {
      const microbatch = examples.subarray(first, first + b);
      let loss = 0;
      for (const example of microbatch) {
        loss += this.network.addGradient(this.weights, example, this.microbatch, this.changed);
      }
      losses.push(loss / microbatch.length);
      norms.push(this.accumulate() / microbatch.length);
    }
    const norm = this.divide(examples.length);
    this.apply(this.weights, this.window, learningRate, ++this.updates);
    this.window.fill(0);
    return { losses, norms, norm };
  }

  /** The share of examples, `from` up to `to`, whose class has the highest probability. */
  accuracy(from, to) {
    const { digits, logits } = this.network;
    let right = 0;
    for (let example = from; example < to; example++) {
      this.network.loss(this.weights, example);
      if (logits.indexOf(Math.max(...logits)) === digits.classes[example]) right++;
    }
    return right / (to - from);
  }

  /** Add the micro-batch's sum to the window's, and begin it again. Returns its norm. */
  accumulate() {
    let squares = this.add(HIDDEN_BIASES, WEIGHTS);
    for (let pixel = 0; pixel < INPUTS; pixel++) {
      if (this.changed[pixel]) squares += this.add(pixel * UNITS, (pixel + 1) * UNITS); // the others are 0
    }
    this.changed.fill(0);
    return Math.sqrt(squares);
  }

  /** The same for a range of weights. Returns the sum of squares. */
  add(from, to) {
    const { microbatch, window } = this;
    let squares = 0;
    for (let i = from; i < to; i++) {
      const value = microbatch[i];
      squares += value * value;
      window[i] += value;
      microbatch[i] = 0;
    }
    return squares;
  }

  /** Divide the window's sum by its examples. Returns the norm of the mean. */
  divide(examples) {
    const { window } = this;
    let squares = 0;
    for (let i = 0; i < WEIGHTS; i++) {
      const mean = window[i] / examples;
      window[i] = mean;
      squares += mean * mean;
    }
    return Math.sqrt(squares);
  }
}

const SLICE = 100; // milliseconds of training between two messages

/**
 * Train from the seed of a job: the settings, the seed, a number that comes back with each answer, and counts.
 * @param {Digits} digits
 * @param {function(Object[], boolean): Promise<boolean>} tell Takes the updates that were made since it was last called
 *   and whether they were the last. It promises whether to go on.
 */
async function train(digits, job, tell) {
  const { k, b, seed, updates, evaluateEvery, trainingExamples, testExamples } = job;
  const random = generator(seed);
  const training = new Training(digits, job, initialWeights(random));
  let made = [];
  let due = 0; // the first update is told at once
  for (let update = 1; update <= updates; update++) {
    const examples = Uint32Array.from({ length: k * b }, () => Math.floor(random() * trainingExamples)); // with replacement
    const began = performance.now();
    const found = training.update(examples);
    const milliseconds = performance.now() - began;
    const measured = update % evaluateEvery === 0 || update === updates;
    const accuracy = measured ? training.accuracy(trainingExamples, trainingExamples + testExamples) : NaN;
    made.push({ ...found, milliseconds, accuracy });
    const last = update === updates || !found.losses.every(Number.isFinite);
    if (!last && performance.now() < due) continue;
    if (!await tell(made, last) || last) return;
    made = [];
    due = performance.now() + SLICE;
  }
}

/** Do what the page asks for. It sends the digits first, then jobs, of which the last one counts. */
function serve(scope) {
  let digits = null; // a promise
  let current = null;
  let pause = null; // a promise that ends with the pause
  let resume = () => {};

  async function begin(job) {
    current = job;
    await train(await digits, job, async (made, finished) => {
      scope.postMessage({ number: job.number, seed: job.seed, made, finished });
      await new Promise((go) => setTimeout(go)); // hears what the page has sent
      while (pause && job === current) await pause;
      return job === current;
    });
  }

  scope.onmessage = ({ data }) => {
    resume();
    pause = data.pause ? new Promise((end) => (resume = () => end(null))) : null;
    if (data.digits) digits = digitsOf(data.digits);
    if (data.job) begin(data.job).catch(report);
  };
}

/** Let the page hear of an error: it is told of those of a worker's functions, but not of its promises. */
function report(error) {
  setTimeout(() => {
    throw error;
  });
}

if (globalThis.constructor.name === "DedicatedWorkerGlobalScope") serve(globalThis);
