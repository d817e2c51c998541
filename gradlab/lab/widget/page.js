/** Keeps the keys of a lab from JupyterLab, and names its sliders, fields and pictures for screen readers. */

function label(/** @type {Element} */ lab) {
  for (const slider of lab.querySelectorAll("[role=slider]:not([aria-label])")) {
    const words = slider.closest(".widget-inline-hbox")?.querySelector("label")?.textContent;
    if (words) slider.setAttribute("aria-label", words);
  }
  for (const field of lab.querySelectorAll("input[title]:not([aria-label])")) field.setAttribute("aria-label", field.title);
  // The words of a picture stand beside it, visually hidden.
  lab.querySelectorAll("img.gradlab-view:not([alt])").forEach((image) => image.setAttribute("alt", ""));
}

// In JupyterLab's command mode, plain keys act on cells: the arrow keys leave the lab, and d d deletes its cell.
// JupyterLab listens at the document. Keys with a modifier pass, so Ctrl+S still saves.
function keep(/** @type {KeyboardEvent} */ event) {
  if (!(event.ctrlKey || event.metaKey || event.altKey || event.shiftKey)) event.stopPropagation();
}

function render({ el }) {
  let named = null;
  let waiting = requestAnimationFrame(function begin() {
    const lab = el.closest(".gradlab-lab");
    if (!lab) {
      waiting = requestAnimationFrame(begin); // not on the page yet
      return;
    }
    lab.addEventListener("keydown", keep);
    label(lab);
    named = new MutationObserver(() => label(lab));
    named.observe(lab, { childList: true, subtree: true });
  });
  return () => {
    cancelAnimationFrame(waiting);
    named?.disconnect();
  };
}

export default { render };
