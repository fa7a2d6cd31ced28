// The query: a sample, the mean of several, a file or words; and the files that the user gives.

import { currentQuery, navigate } from "./address.js";
import { byId, create, page, pictureUrl } from "./elements.js";
import { filterButton } from "./facets.js";

export const uploads = new Map(); // files of this page, by the number in history.state.upload

/** Whether the focus is in a part that is about to be redrawn, and so would be lost. */
const losesFocus = () => byId("hits").contains(document.activeElement)
  || byId("query").contains(document.activeElement) || document.activeElement === document.body;

/** Draw the query; `picture` is the URL of its picture. */
export function drawQuery(query, upload, picture) {
  const name = upload || query.key;
  const several = query.examples.length;
  const kind = upload ? "Upload" : several ? `${several} samples` : query.number === null ? "Words" : "Sample";
  const title = several ? kind : `${kind} ${name}`;
  const takeFocus = !byId("query").hidden && losesFocus();
  byId("query-title").textContent = title;
  document.title = `${title} · Heron`;
  const children = [];
  if (several) children.push(examples(query));
  else if (picture) children.push(create("img", { src: picture, alt: `Picture of ${name}`, width: 128, height: 128 }));
  if (upload && picture) children[0].addEventListener("load", () => URL.revokeObjectURL(picture));
  children.push(create("div", { class: "beside" }, ...labels(query, upload)));
  byId("query-body").replaceChildren(...children);
  byId("query").hidden = false;
  if (takeFocus) byId("query-title").focus();
}

/** The labels of a query; for a file, those of its nearest neighbours. */
function labels(query, upload) {
  const predicted = Object.entries(query.predicted);
  if (upload && query.voters) {
    const note = create("p", { id: "predicted" }, predicted.length
      ? `Predicted by its ${query.voters} nearest samples, not by a classifier:`
      : `None of the labels is shared by half of its ${query.voters} nearest samples.`);
    const list = predicted.map(([label, share]) =>
      create("li", {}, filterButton(label), ` ${Math.round(100 * share)} %`));
    return [note, create("ul", { class: "labels" }, ...list)];
  }
  if (query.labels.length) {
    const list = query.labels.map((label) => create("li", {}, filterButton(label)));
    const note = query.examples.length ? [create("p", {}, "All of them have:")] : [];
    return [...note, create("ul", { class: "labels" }, ...list)];
  }
  if (query.examples.length) return [create("p", {}, "They have no label in common.")];
  return [create("p", {}, query.labelled ? "It has none of the labels." : "It has no labels.")];
}

/** The samples of the query, each with a button that removes it. */
function examples(query) {
  const remove = (key) => navigate({ key: currentQuery().key.filter((other) => other !== key) });
  const items = query.keys.map((key, i) => create("li", {},
    page.about.pictures
      ? create("img", { src: pictureUrl(query.examples[i]), alt: `Picture of ${key}`, width: 64, height: 64 })
      : null,
    create("button", { type: "button", title: `Remove ${key}`, onclick: () => remove(key) }, `${key} ×`)));
  return create("ul", { class: "examples" }, ...items);
}

/** Search by a file. */
export function searchByFile(file) {
  if (!file) return;
  uploads.set(uploads.size, file);
  navigate({ key: [], upload: file.name || "a pasted file", relation: "neighbours" }, uploads.size - 1);
}

/** Search by files that are chosen, dropped anywhere on the page, or pasted. */
export function listenForFiles() {
  byId("file").addEventListener("change", () => {
    searchByFile(byId("file").files[0]);
    byId("file").value = ""; // so that the same file can be chosen again
  });
  const dragsFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!dragsFiles(event)) return;
    event.preventDefault();
    byId("drop").hidden = false;
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) byId("drop").hidden = true;
  });
  addEventListener("drop", (event) => {
    byId("drop").hidden = true;
    if (!dragsFiles(event)) return;
    event.preventDefault();
    searchByFile(event.dataTransfer.files[0]);
  });
  addEventListener("paste", (event) => {
    if (event.clipboardData?.files.length) searchByFile(event.clipboardData.files[0]);
  });
}
