/** graph_film.py on a page without a kernel: its frames, one after the other. */
import { liven } from "./saved_controls.js";

/**
 * @typedef {Object} Film What graph_film.py says of it.
 * @property {string[]} frames HTML of each step.
 * @property {number} milliseconds Of a step, while it plays.
 * @property {import("./saved_controls.js").Control[]} controls
 */

export function showGraphFilm(/** @type {HTMLElement} */ root, /** @type {Film} */ { frames, milliseconds, controls }) {
  let timer = 0; // 0: it does not play
  const button = document.createElement("button");
  button.type = "button";
  liven(root, controls, ({ step }) => ({ html: frames[step] }));
  const slider = /** @type {HTMLInputElement} */ (root.querySelector("input"));
  root.firstElementChild.prepend(button);

  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(next, milliseconds) : 0;
    button.textContent = on ? "pause" : "run";
  }

  function go(step) {
    slider.value = step;
    slider.dispatchEvent(new Event("input"));
  }

  function next() {
    const step = Number(slider.value) + 1;
    go(step);
    if (step >= frames.length - 1) play(false);
  }

  button.addEventListener("click", () => {
    const on = !timer;
    if (on && Number(slider.value) === frames.length - 1) go(0);
    play(on);
  });
  play(false);
}
