// Exports: the shown results with their scores, or the keys of all samples that pass.

import { currentQuery } from "./address.js";
import { apiUrl, byId, create } from "./elements.js";

let shown = null; // the answer that is on the page

/** A CSV field, in quotes if it needs them; what a spreadsheet would compute begins with an apostrophe: see csv_line. */
const csvField = (value) => {
  const text = /^(?![+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$)[-=+@\t\r]/.test(`${value}`.replace(/^'+/, "")) ? `'${value}` : `${value}`;
  return /[",\r\n]|^'/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

function save(name, kind, text) {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  create("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Offer an answer for export, and the keys that pass the same filter and outline; null hides both. */
export function updateExports(answer) {
  shown = answer;
  byId("export").hidden = answer === null;
  const { where, lasso } = currentQuery();
  for (const format of ["csv", "json"]) byId(`keys-${format}`).href = apiUrl("export", { format, where, lasso });
}

/** Save the results at a click. */
export function listenForExports() {
  byId("results-csv").addEventListener("click", () => {
    const rows = shown.hits.map((hit) =>
      [hit.key, hit.score, hit.label_distance ?? "", hit.labels.join("; ")].map(csvField).join(","));
    save("results.csv", "text/csv", ["key,score,label_distance,labels", ...rows, ""].join("\r\n"));
  });
  byId("results-json").addEventListener("click", () =>
    save("results.json", "application/json", JSON.stringify(shown, null, 1)));
}
