/**
 * Three descents of the toy that see the same micro-batches: one after the other, k at a time, and one after the other
 * at a k-th of the rate. What does accumulation buy?
 */
import { dot, line } from "./canvas.js";

/**
 * @typedef {Object} Runner
 * @property {string} name
 * @property {number} steps Micro-batches of an update.
 * @property {number[][]} path The weights before each update and after the last.
 * @property {number[]} losses The losses at these weights.
 * @property {number} floor The mean loss at which the noise keeps the descent.
 */

const TAIL = 80; // points of a path that are drawn: all 1,200 of one would hide the others

/** @returns {Runner[]} The three descents from a starting point, with k of 2 or more. */
export function race(/** @type {import("./one_update.js").Toy} */ toy, start, k) {
  const { curvature, deviation, unit, learningRate: rate } = toy;
  const slope = (at, microbatch, d) => {
    const place = 2 * (Math.floor(microbatch / k) * toy.most + microbatch % k) + d;
    return curvature[d] * at[d] + deviation * unit * toy.noise[place];
  };
  const run = (name, steps, rate) => {
    const path = [start];
    for (let first = 0; first < toy.updates * k; first += steps) {
      const at = path.at(-1);
      path.push([0, 1].map((d) => {
        let sum = 0;
        for (let i = first; i < first + steps; i++) sum += slope(at, i, d);
        return at[d] - rate * sum / steps;
      }));
    }
    const floors = curvature.map((h) => rate * deviation ** 2 / (2 * steps * (2 - rate * h)));
    const losses = path.map((at) => (curvature[0] * at[0] ** 2 + curvature[1] * at[1] ** 2) / 2);
    return { name, steps, path, losses, floor: floors[0] + floors[1] };
  };
  return [run("k = 1", 1, rate), run(`k = ${k}`, k, rate), run(`k = 1, rate ÷ ${k}`, 1, rate / k)];
}

/** The updates that a descent has made when so many micro-batches were seen. */
export function updatesAt(/** @type {Runner} */ { steps, path }, seen) {
  return Math.min(path.length - 1, Math.floor(seen / steps));
}

/** Where the descents are, for readers who cannot see them: the mean loss of the last tenth of the race. */
export function describeRace(/** @type {Runner[]} */ runners) {
  const settled = ({ losses }) => {
    const last = losses.slice(Math.floor(0.9 * losses.length));
    return last.reduce((one, other) => one + other) / last.length;
  };
  const said = runners.map((runner) =>
    `${runner.name}: loss ${settled(runner).toFixed(3)}, ${runner.path.length - 1} updates`
  );
  return `Race: the same micro-batches for all. At the end, ${said.join("; ")}.`;
}

/** The color of each descent. */
export function raceColors(colors) {
  return [colors.path, colors.floor, colors.third];
}

/** Draw the paths in the valley. */
export function drawPaths(context, /** @type {Runner[]} */ runners, seen, toPixels, colors) {
  runners.forEach((runner, i) => {
    const color = raceColors(colors)[i];
    const made = updatesAt(runner, seen) + 1;
    const points = runner.path.slice(Math.max(0, made - TAIL), made).map(toPixels);
    context.globalAlpha = 0.5;
    line(context, points, color, 1.2);
    context.globalAlpha = 1;
    dot(context, points.at(-1), 5, color, colors.ground);
  });
}

/** Draw the losses against the micro-batches that were seen; x and y: functions to pixels, x of a share. */
export function drawLossesOf(/** @type {Runner[]} */ runners, seen, { x, y }, context, colors) {
  const all = (runners[0].path.length - 1) * runners[0].steps;
  runners.forEach((runner, i) => {
    const color = raceColors(colors)[i];
    const losses = runner.losses.slice(0, updatesAt(runner, seen) + 1);
    context.globalAlpha = 0.8;
    line(context, losses.map((loss, update) => [x(update * runner.steps / all), y(loss)]), color, 1);
    context.globalAlpha = 1;
    line(context, [[x(0), y(runner.floor)], [x(1), y(runner.floor)]], color, 1.2, [5, 3]);
  });
}
