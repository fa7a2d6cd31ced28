// Files of what is shown: the results with their scores, or the keys of all that pass.

import { asked } from "./address.js";
import { api, at, make } from "./elements.js";

let shown = null; // the answer that is on the page

/** A field of CSV, in quotes where it needs some. */
const field = (value) => /[",\r\n]/.test(`${value}`) ? `"${`${value}`.replaceAll('"', '""')}"` : `${value}`;

function save(name, kind, text) {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Offer an answer, and what passes the same filter and outline. */
export function offer(answer) {
  shown = answer;
  at("export").hidden = answer === null;
  const { where, lasso } = asked();
  for (const format of ["csv", "json"]) at(`keys-${format}`).href = api("export", { format, where, lasso });
}

/** Write the results to a file at a click. */
export function listenForExports() {
  at("results-csv").addEventListener("click", () => {
    const rows = shown.hits.map((hit) =>
      [hit.key, hit.score, hit.label_distance ?? "", hit.labels.join("; ")].map(field).join(","));
    save("results.csv", "text/csv", ["key,score,label_distance,labels", ...rows, ""].join("\r\n"));
  });
  at("results-json").addEventListener("click", () =>
    save("results.json", "application/json", JSON.stringify(shown, null, 1)));
}
