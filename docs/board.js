// Show only the methods of the board that need nothing but what is ticked.
document.addEventListener("DOMContentLoaded", () => {
  const tables = [...document.querySelectorAll(".board table")];
  if (!tables.length) return;
  const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
  const needs = (row) => row.cells[row.cells.length - 1].textContent.split(", ").filter(Boolean);
  const kinds = [...new Set(rows.flatMap(needs))].sort();
  const boxes = kinds.map((kind) => {
    const label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: true });
    label.append(box, ` ${kind} `);
    box.addEventListener("change", show);
    return { kind, box, label };
  });
  function show() {
    const allowed = boxes.filter(({ box }) => box.checked).map(({ kind }) => kind);
    for (const row of rows) row.hidden = !needs(row).every((need) => allowed.includes(need));
  }
  const filter = document.createElement("p");
  filter.append("Show methods that may need: ", ...boxes.map(({ label }) => label));
  document.querySelector(".board").prepend(filter);
});
