// Opens what a cell stands for. Without it, everything is on the page below the tables.
"use strict";
const show = (id) => {
  const dialog = id && document.getElementById(id);
  if (!(dialog instanceof HTMLDialogElement) || dialog.open) return;
  for (const other of document.querySelectorAll("dialog[open]")) other.close();
  dialog.showModal();
  dialog.scrollTop = 0;
  history.replaceState(null, "", "#" + id);
};
document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-open]");
  if (opener) return show(opener.dataset.open);
  // Outside of what the dialog shows is its backdrop.
  if (event.target instanceof HTMLDialogElement) event.target.close();
});
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("close", () => history.replaceState(null, "", "#"));
}
// The arrow keys go from cell to cell.
document.addEventListener("keydown", (event) => {
  const cell = event.target.closest?.(".matrix td, .matrix thead th");
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!cell || !step) return;
  const rows = [...document.querySelectorAll(".matrix tr")].filter((row) => row.offsetParent !== null || row.offsetHeight > 0);
  const row = rows[rows.indexOf(cell.parentElement) + step[0]];
  const next = row?.cells[cell.cellIndex + step[1]]?.querySelector("button");
  if (!next) return;
  event.preventDefault();
  next.focus();
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
});
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("dialog.evidence details.drawn")) details.open = true;
});
window.addEventListener("hashchange", () => show(location.hash.slice(1)));
// Not before the browser itself has gone to the address, which takes the focus away again.
window.addEventListener("load", () => setTimeout(() => show(location.hash.slice(1))));
