// The results: pictures with their score and what differs in their labels, or a table of samples
// that have no pictures; and files of them, or of the keys of all that pass.

import { address, asked, go } from "./address.js";
import { api, at, counted, make, page, source } from "./elements.js";

const WHAT = { neighbours: "neighbour", hard: "hard negative", false: "false negative" };
const SCORES = { cosine: "cosine", inner_product: "product", euclidean: "distance" };
const DIFFERENCES = 3; // labels of a result that are shown
let shown = null; // the answer that is on the page

/** Draw an answer of the server. */
export function drawHits(answer) {
  const { query, hits, allowed, where, relation, far, close, instead } = answer;
  const filtered = [where && "the filter", asked().lasso && "the outline"].filter(Boolean);
  const among = `${counted(allowed, "sample")} to choose from`
    + (filtered.length ? `, with ${filtered.join(" and ")}` : "");
  const apart = far !== null ? `, whose labels differ by ${far.toFixed(3)} or more`
    : close ? `, whose labels differ by ${close.toFixed(3)} or less` : "";
  at("status").textContent = instead
    ? `No false negative: no other sample has ${close ? "close labels" : "the query's labels"}. `
      + `These are the nearest in label space, of ${among}.`
    : `${counted(hits.length, WHAT[relation])} of ${among}${apart}.`;
  const differ = differences(query);
  at("hits").replaceChildren(page.about.pictures ? grid(hits, differ) : table(hits, differ));
  const links = [...at("hits").querySelectorAll("a")];
  links.forEach((link, place) => {
    link.addEventListener("focus", () => rove(links, place));
    link.addEventListener("keydown", (event) => move(event, links, place));
  });
  if (links.length) rove(links, 0);
}

/** A function that gives the labels of a hit that the query lacks, and those that it has instead. */
function differences(query) {
  const own = new Set(query.labels);
  return (hit) => {
    if (!query.labelled) return null;
    const theirs = new Set(hit.labels);
    return {
      more: hit.labels.filter((name) => !own.has(name)),
      less: query.labels.filter((name) => !theirs.has(name)),
    };
  };
}

/** A list of differences, + before +, − and + in turn; without a query's labels, the hit's own. */
function labelList(hit, differ, most) {
  const found = differ(hit);
  if (found === null) {
    return make("ul", { class: "differ" }, ...hit.labels.slice(0, most).map((n) => make("li", {}, n)));
  }
  const { more, less } = found;
  const marked = [];
  for (let i = 0; i < Math.max(more.length, less.length); i += 1) {
    if (i < more.length) marked.push(make("li", {}, make("ins", {}, `+ ${more[i]}`)));
    if (i < less.length) marked.push(make("li", {}, make("del", {}, `− ${less[i]}`)));
  }
  if (!marked.length) marked.push(make("li", {}, "the same labels"));
  const rest = [...more.map((name) => `+ ${name}`), ...less.map((name) => `− ${name}`)];
  return make("ul", { class: "differ", title: rest.join("\n") }, ...marked.slice(0, most));
}

const score = (hit) => `${SCORES[page.about.metric] ?? "score"} ${hit.score.toPrecision(4)}`;

/** A link that makes a result the query; with Ctrl or a middle click it opens beside. */
function link(hit, ...children) {
  const there = { key: [hit.key], text: "", upload: "" };
  return make("a", {
    href: address({ ...asked(), ...there }),
    onclick: (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
      event.preventDefault();
      go(there);
    },
  }, ...children);
}

/** Ask for the mean of the samples that are asked for and of another one. */
export const addExample = (key) =>
  go({ key: [...asked().key.filter((other) => other !== key), key], relation: "neighbours" });

/** A button that adds a result to the query's examples; an upload or words have none. */
function adder(hit) {
  if (!asked().key.length) return null;
  return make("button", {
    type: "button", class: "add", tabindex: -1, "data-key": hit.key,
    title: `Ask for ${hit.key} as well (key a)`, "aria-label": `Ask for ${hit.key} as well`,
    onclick: () => addExample(hit.key),
  }, "+");
}

function grid(hits, differ) {
  const cards = hits.map((hit) => make("li", {},
    link(hit,
      make("img", { src: source(hit.number), alt: "", loading: "lazy", width: 152, height: 152 }),
      make("b", { title: hit.key }, hit.key),
      make("span", { class: "measure", title: score(hit) }, hit.score.toPrecision(3))),
    adder(hit),
    labelList(hit, differ, DIFFERENCES)));
  return make("ol", { class: "grid" }, ...cards);
}

function table(hits, differ) {
  const head = ["Sample", "Score", "Labels differ", "Labels"];
  const rows = hits.map((hit) => make("tr", {},
    make("th", { scope: "row" }, link(hit, hit.key), adder(hit)),
    make("td", { class: "number" }, score(hit)),
    make("td", { class: "number" }, hit.label_distance?.toFixed(2) ?? "–"),
    make("td", {}, labelList(hit, differ, 50))));
  return make("div", { class: "wide" }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows)));
}

/** The results are one stop of the Tab key; the button of the one with the focus follows it. */
function rove(links, place) {
  links.forEach((link, other) => {
    const index = other === place ? 0 : -1;
    link.tabIndex = index;
    for (const button of link.closest("li, tr").querySelectorAll("button")) button.tabIndex = index;
  });
}

/** Arrow keys go from result to result, by the rows and columns in which they stand; a adds one. */
function move(event, links, place) {
  const adding = links[place].closest("li, tr").querySelector(".add");
  if (event.key === "a" && adding && !event.ctrlKey && !event.metaKey && !event.altKey) {
    adding.click();
    return;
  }
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
