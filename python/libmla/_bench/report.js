// SPDX-License-Identifier: Apache-2.0
// Makes tables of results sortable by their headers and gives each a box that filters its rows.
"use strict";

function sortRows(table, column, header) {
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const numeric = header.classList.contains("number");
  const keyed = Array.from(table.tBodies[0].rows, (row) => {
    const text = row.cells[column].dataset.value;
    return { row, key: numeric ? parseFloat(text) : text };
  });
  const missing = (key) => key === "" || Number.isNaN(key);
  keyed.sort((a, b) => {
    if (missing(a.key) || missing(b.key)) return missing(a.key) - missing(b.key);
    const order = numeric ? a.key - b.key : a.key.localeCompare(b.key);
    return ascending ? order : -order;
  });
  table.tBodies[0].append(...keyed.map((one) => one.row));
}

function makeSortable(table) {
  Array.from(table.tHead.rows[0].cells).forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => sortRows(table, column, header));
  });
}

function addFilter(table) {
  const rows = Array.from(table.tBodies[0].rows);
  const box = document.createElement("input");
  box.type = "search";
  box.placeholder = "Filter, such as: bf16 128";
  box.setAttribute("aria-label", "Show only cases that contain these words");
  const count = document.createElement("span");
  count.className = "muted";
  const update = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = `${shown === rows.length ? "" : `${shown} of `}${rows.length} case${rows.length === 1 ? "" : "s"}`;
  };
  box.addEventListener("input", update);
  const tools = document.createElement("div");
  tools.className = "tools";
  tools.append(box, count);
  table.parentElement.before(tools);
  update();
}

for (const table of document.querySelectorAll("table.results")) {
  makeSortable(table);
  addFilter(table);
}
