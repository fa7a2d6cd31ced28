// The query: a sample, the mean of several, a file or words; and the files that the user gives.

import { currentQuery, navigate } from "./address.js";
import { byId, create, page, pictures, values } from "./elements.js";
import { filterButton } from "./facets.js";

export const uploads = new Map(); // views and files of this page, by the number in history.state.upload

const TYPES = { // of the files of each kind of view, as a browser and as words have them
  image: ["image/jpeg,image/png,image/webp,image/gif,image/tiff,image/bmp", "a picture"],
  vector: [".npy", "an .npy file of one row"],
  text: [".txt,text/plain", "a text file"], graph: ["", "a graph file"],
};

/** Whether the focus is in a part that is about to be redrawn, and so would be lost. */
const losesFocus = () => byId("hits").contains(document.activeElement)
  || byId("query").contains(document.activeElement) || document.activeElement === document.body;

/** Draw the query of an answer; `shown` holds view and URL of the pictures that were uploaded. */
export function drawQuery(answer, upload, shown = []) {
  const { query } = answer;
  const name = upload || query.key;
  const several = query.examples.length;
  const kind = upload ? "Upload" : several ? `${several} samples` : query.number === null ? "Words" : "Sample";
  const title = several ? kind : `${kind} ${name}`;
  const takeFocus = !byId("query").hidden && losesFocus();
  byId("query-title").textContent = title;
  document.title = `${title} · Heron`;
  const children = [];
  if (several) children.push(examples(query));
  else if (upload) children.push(...shown.map(({ view, url }) => figure(view, create("img", {
    src: url, alt: `Picture of ${name}`, width: 128, height: 128, onload: () => URL.revokeObjectURL(url),
  }))));
  else if (query.number !== null) {
    children.push(...pictures(query.number, `Picture of ${name}`, 128).map((image) => figure(image.title, image)));
    children.push(...values(query.number, answer));
  }
  const compares = query.compares && create("p", { id: "compares" }, `Compared: ${query.compares}.`);
  children.push(create("div", { class: "beside" }, compares || null, ...labels(query, upload)));
  byId("query-body").replaceChildren(...children);
  byId("query").hidden = false;
  if (takeFocus) byId("query-title").focus();
}

/** A picture with the name of its view, if there are several. */
const figure = (view, image) => (page.about.picture_views.length < 2 ? image
  : create("figure", {}, image, create("figcaption", {}, view)));

/** The labels of a query; for a file, those of its nearest neighbours. */
function labels(query, upload) {
  const predicted = Object.entries(query.predicted);
  if (upload && query.voters) {
    const note = create("p", { id: "predicted" }, predicted.length
      ? `Predicted from its ${query.voters} nearest samples, not by a classifier:`
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
    create("span", { class: "views" }, ...pictures(query.examples[i], `Picture of ${key}`, 64)),
    create("button", { type: "button", title: `Remove ${key}`, onclick: () => remove(key) }, `${key} ×`)));
  return create("ul", { class: "examples" }, ...items);
}

/** The views that a file may be given of; without a model of the index, one without a name. */
const inputs = () => (page.about.inputs.length ? page.about.inputs
  : [{ name: "", kind: page.about.pictures ? "image" : "vector" }]);

/** Whether a file looks like one of a kind of view; the server looks at its bytes. */
const looksLike = (file, kind) => TYPES[kind][0].split(",").some((type) =>
  file.type === type || (type.startsWith(".") && file.name.endsWith(type)));

/** Search by files, a Map from views; none searches for nothing. */
function searchBy(files) {
  if (!files.size) return;
  const named = [...files].map(([view, file]) => {
    const name = file.name || "a pasted file";
    return inputs().length > 1 ? `${view}: ${name}` : name;
  });
  uploads.set(uploads.size, files);
  navigate({ key: [], upload: named.join(", "), relation: "neighbours" }, uploads.size - 1);
}

/** The files of the query that is shown, by view. */
const givenFiles = () => new Map(uploads.get(history.state?.upload) ?? []);

/** Search by dropped or pasted files: each of the first view left that it looks like. */
function searchByFiles(files) {
  const given = new Map();
  for (const file of files) {
    const left = inputs().filter(({ name }) => !given.has(name));
    const view = left.find(({ kind }) => looksLike(file, kind)) ?? left[0];
    if (view) given.set(view.name, file);
  }
  searchBy(given);
}

/** The part of the page that takes the file of a view, chosen or dropped there. */
function zone({ name, kind }, number) {
  const several = inputs().length > 1;
  const take = (file) => file && searchBy(givenFiles().set(name, file));
  const id = number ? `file-${number}` : "file";
  const input = create("input", {
    id, type: "file", accept: TYPES[kind][0], "aria-describedby": "upload-note",
    onchange: (event) => {
      take(event.target.files[0]);
      event.target.value = ""; // so that the same file can be chosen again
    },
  });
  const label = create("label", { for: id }, several ? name : "Or a file");
  const words = kind === "text" ? create("input", {
    type: "text", maxlength: page.about.longest, placeholder: "or type it and press Enter", "aria-label": `Words of ${name}`,
    onkeydown: (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // the form would query the key
      const text = event.target.value.trim();
      if (text) take(new File([text], `“${text}”`, { type: "text/plain" }));
    },
  }) : "";
  if (!several) return [label, input, words];
  const remove = create("button", {
    type: "button", title: `Search without ${name}`, "aria-label": `Search without ${name}`, "data-view": name,
    onclick: () => { const files = givenFiles(); files.delete(name); searchBy(files); },
  }, "×");
  const over = (on) => (event) => event.currentTarget.classList.toggle("over", on);
  return [create("span", {
    class: "zone", "data-view": name, ondragover: over(true), ondragleave: over(false),
    ondrop: (event) => {
      over(false)(event);
      event.preventDefault();
      event.stopPropagation(); // the page would take it for the first view
      byId("drop").hidden = true;
      take(event.dataTransfer.files[0]);
    },
  }, label, " ", input, words, remove)];
}

/** Offer to remove the file of a view where there is another one. */
export function updateZones() {
  const files = currentQuery().upload ? givenFiles() : new Map();
  for (const button of byId("zones").querySelectorAll("button")) {
    button.hidden = files.size < 2 || !files.has(button.dataset.view);
  }
}

/** Search by files that are chosen, dropped on the zone of a view or anywhere, or pasted. */
export function listenForFiles() {
  byId("zones").replaceChildren(...inputs().flatMap(zone));
  const several = inputs().length > 1;
  const kinds = [...new Set(inputs().map(({ kind }) => TYPES[kind][1]))];
  byId("upload-note").textContent = (several ? "for any of the views: " : "")
    + (page.about.pictures || several ? "choose, drop or paste " : "") + kinds.join(", ")
    + `, at most ${Math.floor(page.about.upload_bytes / 1e6)} MB${several ? " in total" : ""}`;
  updateZones();
  const dragsFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!dragsFiles(event)) return;
    event.preventDefault();
    byId("drop").hidden = several; // the zones are to be seen
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) byId("drop").hidden = true;
  });
  addEventListener("drop", (event) => {
    byId("drop").hidden = true;
    if (!dragsFiles(event)) return;
    event.preventDefault();
    searchByFiles(event.dataTransfer.files);
  });
  addEventListener("paste", (event) => {
    if (event.clipboardData?.files.length) searchByFiles(event.clipboardData.files);
  });
}
