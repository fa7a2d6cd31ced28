// The query: a sample, several samples as one, a file or words; and the files that were given.

import { asked, go } from "./address.js";
import { at, make, page, source } from "./elements.js";
import { chip } from "./facets.js";

export const uploads = new Map(); // files of this page, by the number that history.state.upload holds

/** Whether the focus is in what is drawn anew, so that it would be lost. */
const losesFocus = () => at("hits").contains(document.activeElement)
  || at("query").contains(document.activeElement) || document.activeElement === document.body;

/** Draw what was asked for; `picture` is the address of an upload's picture. */
export function drawQuery(query, upload, picture) {
  const name = upload || query.key;
  const several = query.examples.length;
  const kind = upload ? "Upload" : several ? `${several} samples` : query.number === null ? "Words" : "Sample";
  const title = several ? kind : `${kind} ${name}`;
  const takeFocus = !at("query").hidden && losesFocus();
  at("query-title").textContent = title;
  document.title = `${title} · Heron`;
  const parts = [];
  if (several) parts.push(examples(query));
  else if (picture) parts.push(make("img", { src: picture, alt: `Picture of ${name}`, width: 128, height: 128 }));
  if (upload && picture) parts[0].addEventListener("load", () => URL.revokeObjectURL(picture));
  parts.push(make("div", { class: "beside" }, ...described(query, upload)));
  at("query-body").replaceChildren(...parts);
  at("query").hidden = false;
  if (takeFocus) at("query-title").focus();
}

/** The labels of a query; of a file those that its nearest neighbours have. */
function described(query, upload) {
  const predicted = Object.entries(query.predicted);
  if (upload && query.voters) {
    const note = make("p", { id: "predicted" }, predicted.length
      ? `Predicted by its ${query.voters} nearest samples, not by a classifier:`
      : `No label is had by half of its ${query.voters} nearest samples.`);
    const list = predicted.map(([label, share]) =>
      make("li", {}, chip(label), ` ${Math.round(100 * share)} %`));
    return [note, make("ul", { class: "labels" }, ...list)];
  }
  if (query.labels.length) {
    const list = query.labels.map((label) => make("li", {}, chip(label)));
    const note = query.examples.length ? [make("p", {}, "All of them have:")] : [];
    return [...note, make("ul", { class: "labels" }, ...list)];
  }
  if (query.examples.length) return [make("p", {}, "They have no label in common.")];
  return [make("p", {}, query.labelled ? "It has none of the labels." : "It has no labels.")];
}

/** The samples of one query, each with a button that leaves it out. */
function examples(query) {
  const without = (key) => go({ key: asked().key.filter((other) => other !== key) });
  const items = query.keys.map((key, place) => make("li", {},
    page.about.pictures
      ? make("img", { src: source(query.examples[place]), alt: `Picture of ${key}`, width: 64, height: 64 })
      : null,
    make("button", { type: "button", title: `Leave ${key} out`, onclick: () => without(key) }, `${key} ×`)));
  return make("ul", { class: "examples" }, ...items);
}

/** Ask for a file. */
export function take(file) {
  if (!file) return;
  uploads.set(uploads.size, file);
  go({ key: [], upload: file.name || "a pasted file", relation: "neighbours" }, uploads.size - 1);
}

/** Take files that are chosen, dropped anywhere on the page, or pasted. */
export function listenForFiles() {
  at("file").addEventListener("change", () => {
    take(at("file").files[0]);
    at("file").value = ""; // so that the same file can be chosen again
  });
  const held = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!held(event)) return;
    event.preventDefault();
    at("drop").hidden = false;
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) at("drop").hidden = true;
  });
  addEventListener("drop", (event) => {
    at("drop").hidden = true;
    if (!held(event)) return;
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
  addEventListener("paste", (event) => {
    if (event.clipboardData?.files.length) take(event.clipboardData.files[0]);
  });
}
