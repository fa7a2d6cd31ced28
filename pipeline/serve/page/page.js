// The page of `heron serve`. The address is the state: what is asked lies in its parameters, so
// that a link can be shared and the back button works. Keys and labels are data that may hold
// markup: every text enters the document as text, never as HTML.

const MEANINGS = {
  neighbours: "The samples nearest to the query.",
  hard: "Near the query, yet far from it in label space: what the model confuses.",
  false: "Near the query, with the same labels: an unsupervised loss pushes these apart wrongly.",
};
const RELATIONS = Object.keys(MEANINGS);
let counts = [12, 24, 48, 96, 200]; // of results, fewer where there are fewer samples
const LABELS_SHOWN = 300; // of the list of all labels
const at = (id) => document.getElementById(id);
const uploads = new Map(); // files of this page, by the number that history.state.upload holds
let about;
let asking = new AbortController();

/** An element with attributes, and children that are elements or text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const counted = (count, noun, plural = `${noun}s`) =>
  `${count.toLocaleString("en")} ${count === 1 ? noun : plural}`;

/** The answer of the server; its error in words is thrown as an Error. */
async function ask(path, options = {}) {
  let response, answer;
  try {
    response = await fetch(path, options);
    answer = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const found = response ? `status ${response.status}` : "no answer";
    throw new Error(`The server gave ${found}; see whether heron serve still runs.`);
  }
  if (!response.ok) throw new Error(answer.error ?? `The server gave status ${response.status}.`);
  return answer;
}

const unasked = () =>
  ({ key: "", text: "", upload: "", where: "", relation: "neighbours", k: counts[1] ?? counts[0] });

/** What the address asks for. */
function asked() {
  const found = { ...unasked(), ...Object.fromEntries(new URLSearchParams(location.search)) };
  found.k = Number(found.k);
  if (!counts.includes(found.k)) found.k = unasked().k;
  if (!RELATIONS.includes(found.relation)) found.relation = unasked().relation;
  return found;
}

/** The address of what is asked; what is as it would be anyway is left out. */
function address(query) {
  const given = { ...query, key: query.upload || query.text ? "" : query.key };
  const changed = Object.entries(unasked()).filter(([name, usual]) => given[name] !== usual);
  return `/?${new URLSearchParams(changed.map(([name]) => [name, given[name]]))}`;
}

/** Go to another query, as a new entry of the history. */
function go(changes, upload = changes.key === undefined ? history.state?.upload : undefined) {
  if (changes.key || changes.upload) changes = { text: "", ...changes };
  history.pushState({ upload }, "", address({ ...asked(), ...changes }));
  return show();
}

/** Fetch and draw what the address asks for. */
async function show() {
  const { key, text, upload, where, relation, k } = asked();
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  at("key").value = key;
  at("text").value = text;
  at("where").value = where;
  at("count").value = k;
  choose(relation, upload || text);
  at("hits").setAttribute("aria-busy", "true");
  try {
    const rest = new URLSearchParams({ where, k });
    let answer, picture;
    if (upload) {
      const file = uploads.get(history.state?.upload);
      if (!file) throw new Error(`${upload} was uploaded to a page that is gone; choose it again.`);
      if (file.size > about.upload_bytes) {
        const most = counted(about.upload_bytes, "byte");
        throw new Error(`${upload} has ${counted(file.size, "byte")}; at most ${most} are taken.`);
      }
      const headers = { "Content-Type": "application/octet-stream" };
      answer = await ask(`/api/upload?${rest}`, { method: "POST", body: file, headers, signal });
      if (about.pictures) picture = URL.createObjectURL(file);
    } else if (text) {
      rest.set("text", text);
      answer = await ask(`/api/text?${rest}`, { signal });
    } else {
      if (!key) {
        const { key: any } = await ask("/api/random", { signal });
        history.replaceState({}, "", address({ ...asked(), key: any }));
        return show();
      }
      rest.set("key", key);
      rest.set("relation", relation);
      answer = await ask(`/api/neighbours?${rest}`, { signal });
      if (about.pictures) picture = source(answer.query.number);
    }
    at("fault").hidden = true;
    drawQuery(answer.query, upload, picture);
    drawHits(answer);
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  } finally {
    if (!signal.aborted) at("hits").removeAttribute("aria-busy");
  }
}

/** Say what went wrong, and show no results that are not those asked for. */
function fail(message) {
  at("fault").textContent = message;
  at("fault").classList.toggle("pointing", message.includes("\n")); // at a character
  at("fault").hidden = false;
  at("query").hidden = true;
  at("hits").replaceChildren();
  at("status").textContent = "";
  document.title = "Error · Heron";
}

const source = (number) => `/api/picture/${number}?of=${about.of}`;

/** A list of labels, each a button that adds it to the filter. */
function labelList(names, differ = new Set(), index = 0) {
  const buttons = names.map((name) =>
    make("li", {}, make("button", {
      type: "button",
      class: differ.has(name) ? "differs" : null,
      title: `Add ${name} to the filter${differ.has(name) ? "; the query lacks it" : ""}`,
      tabindex: index,
      onclick: () => add(name),
    }, name)));
  return make("ul", { class: "labels" }, ...buttons);
}

/** Add a label to the filter. */
function add(name) {
  const plain = /^[^\s'"&|!()]+$/.test(name) && !/^(and|or|not)$/i.test(name);
  const quoted = plain ? name : `'${name.replaceAll("'", "''")}'`;
  const where = at("where").value.trim();
  const parts = where.split(/\s+and\s+/i);
  if (parts.includes(quoted)) return;
  const before = /\bor\b|\|/i.test(where) ? `(${where})` : where;
  go({ where: before ? `${before} and ${quoted}` : quoted });
}

/** Whether the focus is in what is drawn anew, so that it would be lost. */
const losesFocus = () => at("hits").contains(document.activeElement)
  || at("query").contains(document.activeElement) || document.activeElement === document.body;

function drawQuery(query, upload, picture) {
  const name = upload || query.key;
  const kind = upload ? "Upload" : query.number === null ? "Words" : "Sample";
  const title = `${kind} ${name}`;
  const takeFocus = !at("query").hidden && losesFocus();
  at("query-title").textContent = title;
  document.title = `${title} · Heron`;
  const labels = query.labels.length
    ? labelList(query.labels)
    : make("p", {}, query.labelled ? "It has none of the labels." : "It has no labels.");
  const image = picture
    ? make("img", { src: picture, alt: `Picture of ${name}`, width: 128, height: 128 })
    : null;
  if (upload && image) image.addEventListener("load", () => URL.revokeObjectURL(picture));
  at("query-body").replaceChildren(
    ...[image, make("div", { class: "beside" }, labels)].filter(Boolean));
  at("query").hidden = false;
  if (takeFocus) at("query-title").focus();
}

function drawHits({ query, hits, allowed, where, relation, far }) {
  const what = { neighbours: "neighbour", hard: "hard negative", false: "false negative" }[relation];
  const apart = far === null ? "" : `, whose labels differ by ${far.toFixed(3)} or more`;
  const filtered = where ? ", with the filter" : "";
  at("status").textContent =
    `${counted(hits.length, what)} of ${counted(allowed, "sample")} to choose from${filtered}${apart}.`;
  const own = new Set(query.labels);
  const differ = (hit) => new Set(query.labelled ? hit.labels.filter((l) => !own.has(l)) : []);
  at("hits").replaceChildren(about.pictures ? grid(hits, differ) : table(hits, differ));
  const links = [...at("hits").querySelectorAll("a")];
  links.forEach((link, place) => {
    link.addEventListener("focus", () => rove(links, place));
    link.addEventListener("keydown", (event) => move(event, links, place));
  });
  if (links.length) rove(links, 0);
}

const SCORES = { cosine: "cosine", inner_product: "product", euclidean: "distance" };
const score = (hit) => `${SCORES[about.metric] ?? "score"} ${hit.score.toPrecision(4)}`;
const distance = (hit) => hit.label_distance === null ? "" : `labels differ ${hit.label_distance.toFixed(2)}`;

/** A link that makes a result the query; with Ctrl or a middle click it opens beside. */
function link(hit, ...children) {
  const there = { key: hit.key, text: "", upload: "" };
  return make("a", {
    href: address({ ...asked(), ...there }),
    onclick: (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
      event.preventDefault();
      go(there);
    },
  }, ...children);
}

function grid(hits, differ) {
  const cards = hits.map((hit) => make("li", {},
    link(hit,
      make("img", { src: source(hit.number), alt: "", loading: "lazy", width: 152, height: 152 }),
      make("b", {}, hit.key),
      make("span", { class: "measure" }, score(hit)),
      make("span", { class: "measure" }, distance(hit))),
    labelList(hit.labels, differ(hit), -1)));
  return make("ol", { class: "grid" }, ...cards);
}

function table(hits, differ) {
  const head = ["Sample", "Score", "Labels differ", "Labels"];
  const rows = hits.map((hit) => make("tr", {},
    make("th", { scope: "row" }, link(hit, hit.key)),
    make("td", { class: "number" }, score(hit)),
    make("td", { class: "number" }, hit.label_distance?.toFixed(2) ?? "–"),
    make("td", {}, labelList(hit.labels, differ(hit), -1))));
  return make("div", { class: "wide" }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows)));
}

/** The results are one stop of the Tab key; the labels of the one with the focus follow it. */
function rove(links, place) {
  links.forEach((link, other) => {
    const index = other === place ? 0 : -1;
    link.tabIndex = index;
    for (const button of link.closest("li, tr").querySelectorAll("button")) button.tabIndex = index;
  });
}

/** Arrow keys go from result to result, by the rows and columns in which they stand. */
function move(event, links, place) {
  const top = (link) => link.getBoundingClientRect().top;
  const below = links.findIndex((link) => top(link) > top(links[0]) + 1);
  const columns = below < 0 ? links.length : below;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  const ends = { Home: 0, End: links.length - 1 };
  const wanted = ends[event.key] ?? place + (steps[event.key] ?? NaN);
  if (!(wanted in links)) return;
  event.preventDefault();
  links[wanted].focus();
}

/** Mark the tab of a relation; an upload has no labels, so it has the first alone. */
function choose(relation, uploaded) {
  for (const name of RELATIONS) {
    const tab = at(`tab-${name}`);
    tab.setAttribute("aria-selected", name === relation);
    tab.tabIndex = name === relation ? 0 : -1;
    const off = name !== "neighbours" && (uploaded || !about.names.length);
    if (off) tab.setAttribute("aria-disabled", "true");
    else tab.removeAttribute("aria-disabled");
    tab.title = off ? reason(uploaded) : "";
  }
  at("panel").setAttribute("aria-labelledby", `tab-${relation}`);
  const note = uploaded || !about.names.length ? ` ${reason(uploaded)}` : "";
  const marks = !uploaded && about.names.length ? " A + marks labels that the query lacks." : "";
  at("meaning").textContent = MEANINGS[relation] + note + marks;
}

const reason = (uploaded) => uploaded
  ? "The query has no labels: it has neither hard nor false negatives."
  : "These samples have no labels: there are neither hard nor false negatives.";

/** Arrow keys go from tab to tab; Enter or Space, as on any button, opens one. */
function tabKeys(event) {
  const tabs = RELATIONS.map((name) => at(`tab-${name}`));
  const place = tabs.indexOf(event.target);
  const wanted = {
    ArrowRight: (place + 1) % 3, ArrowLeft: (place + 2) % 3, Home: 0, End: 2,
  }[event.key];
  if (wanted === undefined) return;
  event.preventDefault();
  tabs[wanted].focus();
}

/** What the index is, and what can be asked of it. */
function introduce() {
  at("data").textContent = about.data;
  const facts = {
    Index: about.kind, Metric: about.metric.replace("_", " "),
    Samples: about.count.toLocaleString("en"),
    Layer: `${about.layer}, ${about.dim} dimensions`, Recall: about.recall,
  };
  at("about").replaceChildren(...Object.entries(facts).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  counts = counts.filter((count) => count < about.count);
  if (!counts.length) counts = [Math.max(1, about.count - 1)];
  at("count").replaceChildren(...counts.map((count) => make("option", { value: count }, `${count}`)));
  at("file").accept = about.pictures ? "image/jpeg,image/png" : ".npy";
  at("upload-note").textContent = (about.pictures ? "a JPEG or PNG" : "an .npy file, one row")
    + ` of at most ${Math.floor(about.upload_bytes / 1e6)} MB`;
  if (about.names.length) {
    const [first, second] = about.names;
    at("where-note").textContent = second
      ? `Labels with and, or, not and parentheses, such as: ${first} and not ${second}.` : "";
    const shown = about.names.slice(0, LABELS_SHOWN);
    at("labels").querySelector("ul").replaceWith(labelList(shown));
    const rest = about.names.length - shown.length;
    if (rest) at("labels").append(make("small", {}, `and ${counted(rest, "other")}`));
  }
  at("narrow").hidden = false;
  at("text-field").hidden = !about.texts;
  at("labels").hidden = !about.names.length;
}

let typing;
function suggest() {
  clearTimeout(typing);
  typing = setTimeout(async () => {
    const prefix = at("key").value;
    try {
      const { keys } = await ask(`/api/samples?${new URLSearchParams({ prefix })}`);
      at("keys").replaceChildren(...keys.map((key) => make("option", { value: key })));
    } catch {
      at("keys").replaceChildren(); // a suggestion less; what is shown says what went wrong
    }
  }, 120);
}

function listen() {
  const on = (id, type, act) => at(id).addEventListener(type, (event) => {
    if (type === "submit") event.preventDefault(); // the page shows the answer itself
    act();
  });
  on("key", "input", suggest);
  on("key", "focus", suggest);
  on("pick", "submit", () => go({ key: at("key").value.trim(), upload: "" }));
  const find = () => go({ key: "", upload: "", relation: "neighbours", text: at("text").value.trim() });
  on("find", "click", find);
  at("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // or the form would ask for the key
    find();
  });
  on("random", "click", () => go({ key: "", text: "", upload: "" })); // without a key any is shown
  on("narrow", "submit", () => go({ where: at("where").value.trim() }));
  on("clear", "click", () => go({ where: "" }));
  on("count", "change", () => go({ k: Number(at("count").value) }));
  on("file", "change", () => {
    const [file] = at("file").files;
    if (!file) return;
    uploads.set(uploads.size, file);
    go({ key: "", upload: file.name, relation: "neighbours" }, uploads.size - 1);
    at("file").value = ""; // so that the same file can be chosen again
  });
  for (const name of RELATIONS) {
    const tab = at(`tab-${name}`);
    tab.addEventListener("keydown", tabKeys);
    tab.addEventListener("click", () => {
      if (tab.getAttribute("aria-disabled") !== "true") go({ relation: name });
      else at("status").textContent = tab.title;
    });
  }
  addEventListener("popstate", show);
}

try {
  about = await ask("/api/about");
  introduce();
  listen();
  await show();
} catch (error) {
  fail(error.message);
}
