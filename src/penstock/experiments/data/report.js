"use strict";

for (const chooser of document.querySelectorAll(".chooser")) {
  const panes = [...chooser.querySelectorAll(".pane")];
  const count = Number(chooser.dataset.shown);
  const select = chooser.querySelector("select");
  const show = () => {
    // The chosen one first, and its neighbours where there is room; the last ones keep the room filled.
    const first = Math.max(0, Math.min(select.selectedIndex, panes.length - count));
    panes.forEach((pane, index) => { pane.hidden = index < first || index >= first + count; });
  };
  chooser.querySelector(".choose").hidden = panes.length <= count;
  select.addEventListener("change", show);
  show();
}

for (const table of document.querySelectorAll("table.figures")) {
  const heads = [...table.querySelectorAll("th")];
  const value = (row, index) => {
    const text = row.cells[index].textContent;
    const number = parseFloat(text.replace(/[,±%]/g, ""));
    return heads[index].className === "text" || Number.isNaN(number) ? text : number;
  };
  heads.forEach((head, index) => head.querySelector("button").addEventListener("click", () => {
    const isUp = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows].sort((one, other) => {
      const a = value(one, index), b = value(other, index);
      return (a < b ? -1 : a > b ? 1 : 0) * (isUp ? 1 : -1);
    });
    table.tBodies[0].append(...rows);
  }));
}
