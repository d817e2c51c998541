/** The controls of a widget of the course on a page without a kernel, and what they change below them. */

/**
 * @typedef {Object} Control What saved_controls.py says of an ipywidget.
 * @property {string} name
 * @property {string} label
 * @property {[string, any][]} options Words and value of each choice. [["", false], ["", true]]: a box to tick.
 * @property {any} value
 * @property {boolean} slider Whether its choices are on a slider, or in a list.
 */

/** Numbers as Python's `:,.0f` and `:.3g` write them. */
export const grouped = (number) => number.toLocaleString("en-US", { maximumFractionDigits: 0 });
export const short = (number) => String(Number(number.toPrecision(3)));

/** Words as HTML. */
export const escaped = (words) => words.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

const make = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

/** A control's input, with `read` and `write` for its value. */
function inputOf(/** @type {Control} */ { name, label, options, slider }, changed) {
  const ticked = typeof options[0][1] === "boolean";
  const last = options.length - 1;
  const input = ticked
    ? make("input", { type: "checkbox" })
    : slider
    ? make("input", { type: "range", min: 0, max: last, step: 1 })
    : make("select", {}, ...options.map(([words], at) => make("option", { value: at }, words)));
  const said = make("b", { hidden: !slider });
  input.dataset.control = name;
  if (ticked) input.style.width = "auto";

  function say() {
    said.textContent = slider ? options[Number(input.value)][0] : "";
    if (slider) input.setAttribute("aria-valuetext", said.textContent);
  }

  const read = () => options[ticked ? Number(input.checked) : Number(input.value)][1];
  const write = (value) => {
    const at = options.findIndex(([, each]) => each === value);
    if (ticked) input.checked = value;
    else input.value = String(at);
    say();
  };
  input.addEventListener("input", () => {
    say();
    changed(name);
  });
  const node = make("label", {}, ...(ticked ? [input, label] : [label, input, said]));
  node.style.maxWidth = "100%"; // on a phone, a list is narrower than its longest choice
  if (!slider && !ticked) input.style.minWidth = "0";
  return { name, node, input, read, write };
}

/**
 * Put controls, and what they show, in the place of the picture that stands for them.
 *
 * @param {HTMLElement} root
 * @param {Control[]} controls
 * @param {(values: Object, changed: string) => {html: string, values?: Object, unused?: string[]}} show What the values
 *   of all controls show, after one was changed: HTML, values that other controls get, and controls without a use.
 */
export function liven(root, controls, show) {
  const made = controls.map((control) => inputOf(control, draw));
  const shown = make("div");
  shown.style.marginTop = "8px";

  function draw(changed) {
    const values = Object.fromEntries(made.map(({ name, read }) => [name, read()]));
    const { html, values: others = {}, unused = [] } = show(values, changed);
    for (const { name, input, write } of made) {
      if (name in others) write(others[name]);
      input.disabled = unused.includes(name);
    }
    shown.innerHTML = html;
  }

  made.forEach(({ write }, at) => write(controls[at].value));
  root.replaceChildren(
    make("div", { className: "gradlab-offline-row gradlab-offline" }, ...made.map(({ node }) => node)),
    shown,
  );
  draw("");
}
