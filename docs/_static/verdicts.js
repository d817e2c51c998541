// Colors the verdicts of the comparison: what is right, and what names a bug. The words stay, for who sees no colors.
for (const table of document.querySelectorAll("table.docutils")) {
  const cells = [...table.querySelectorAll("td:not(:first-child)")];
  if (!cells.some((cell) => cell.textContent.trim() === "right")) continue;
  for (const cell of cells) {
    if (cell.textContent.trim() === "right") cell.classList.add("gradlab-verdict-right");
    else if (cell.querySelector("code")) cell.classList.add("gradlab-verdict-bug");
  }
}
