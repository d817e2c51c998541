/** Keeps the keys of a lab from JupyterLab, and names its parts: for screen readers, for tests and for other tools. */

const CONTROLS = [
  "accumulation_steps",
  "microbatch_size",
  "learning_rate",
  "seeds",
  "budget_kind",
  "budget",
  "optimizer",
  "method",
  "towers",
  "model",
  "dataset",
  "against",
  "rerun",
];

function label(/** @type {Element} */ lab) {
  for (const slider of lab.querySelectorAll("[role=slider]:not([aria-label])")) {
    const words = slider.closest(".widget-inline-hbox")?.querySelector("label")?.textContent;
    if (words) slider.setAttribute("aria-label", words);
  }
  for (const field of lab.querySelectorAll("input[title]:not([aria-label])")) {
    field.setAttribute("aria-label", field.getAttribute("title"));
  }
  for (const name of CONTROLS) {
    lab.querySelector(`.gradlab-${name}:not([data-control])`)?.setAttribute("data-control", name);
  }
}

// In command mode, plain keys act on cells: the arrow keys leave the lab, and d d deletes its cell. JupyterLab listens at
// the document as the key comes up from the lab, Notebook 7 on its way down, and both obey this attribute of the
// element that has the focus. Keys with a modifier pass, so Ctrl+S still saves.
const SUPPRESS = "data-lm-suppress-shortcuts";

function isPlain(/** @type {KeyboardEvent} */ event) {
  return !(event.ctrlKey || event.metaKey || event.altKey || event.shiftKey);
}

function keep(/** @type {KeyboardEvent} */ event) {
  if (isPlain(event)) event.stopPropagation(); // for hosts that do not know the attribute
}

/** Copy the code beside the button. A page that is not secure has no clipboard: there, the code is selected. */
async function copy(/** @type {MouseEvent} */ { target }) {
  if (!(target instanceof HTMLElement) || !target.matches(".gradlab-copy")) return;
  const code = target.nextElementSibling;
  try {
    await navigator.clipboard.writeText(code.textContent);
    target.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
  }
}

function render({ model, el }) {
  let named = null;
  let suppress = null;
  const state = () => {
    const lab = el.closest(".gradlab-lab");
    if (lab) lab.dataset.state = model.get("state");
  };
  let waiting = requestAnimationFrame(function begin() {
    const lab = el.closest(".gradlab-lab");
    if (!lab) {
      waiting = requestAnimationFrame(begin); // not on the page yet
      return;
    }
    suppress = (event) => lab.contains(event.target) && event.target.toggleAttribute(SUPPRESS, isPlain(event));
    globalThis.addEventListener("keydown", suppress, true);
    lab.addEventListener("keydown", keep);
    lab.addEventListener("click", copy);
    label(lab);
    state();
    named = new MutationObserver(() => label(lab));
    named.observe(lab, { childList: true, subtree: true });
  });
  model.on("change:state", state);
  return () => {
    model.off("change:state", state);
    cancelAnimationFrame(waiting);
    globalThis.removeEventListener("keydown", suppress, true);
    named?.disconnect();
  };
}

export default { render };
