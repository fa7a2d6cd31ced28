// The results: pictures with scores and label differences, or a table if the samples have no
// pictures.

import { addressOf, currentQuery, navigate } from "./address.js";
import { byId, countOf, create, page, pictures, values } from "./elements.js";

const NOUNS = { neighbours: "neighbour", hard: "hard negative", false: "false negative" };
const SCORES = { cosine: "cosine", inner_product: "product", euclidean: "distance" };
const DIFFERENCES = 3; // labels of a result that are shown

/** Draw an answer of the server. */
export function drawHits(answer) {
  const { query, hits, allowed, where, relation, far, close, instead } = answer;
  const restrictions = [where && "the filter", currentQuery().lasso && "the outline"].filter(Boolean);
  const candidates = `${countOf(allowed, "sample")} to choose from`
    + (restrictions.length ? `, with ${restrictions.join(" and ")}` : "");
  const distance = far !== null ? `, whose labels differ by ${far.toFixed(3)} or more`
    : close ? `, whose labels differ by ${close.toFixed(3)} or less` : "";
  byId("status").textContent = instead
    ? `No false negatives: no other sample has ${close ? "close labels" : "the query's labels"}. `
      + `These are the nearest in label space, of ${candidates}.`
    : `${countOf(hits.length, NOUNS[relation])} of ${candidates}${distance}.`;
  const compare = labelComparison(query);
  byId("hits").replaceChildren(page.about.pictures ? grid(answer, compare) : table(answer, compare));
  const links = [...byId("hits").querySelectorAll("a")];
  links.forEach((link, i) => {
    link.addEventListener("focus", () => setTabStop(links, i));
    link.addEventListener("keydown", (event) => moveFocus(event, links, i));
  });
  if (links.length) setTabStop(links, 0);
}

/** A function that returns the labels that a hit has and the query lacks (`more`), and the reverse
(`less`); null if the query has no labels. */
function labelComparison(query) {
  const queryLabels = new Set(query.labels);
  return (hit) => {
    if (!query.labelled) return null;
    const hitLabels = new Set(hit.labels);
    return {
      more: hit.labels.filter((name) => !queryLabels.has(name)),
      less: query.labels.filter((name) => !hitLabels.has(name)),
    };
  };
}

/** A list of label differences, + and − in turn; if the query has no labels, the hit's own labels. */
function labelList(hit, compare, most) {
  const difference = compare(hit);
  if (difference === null) {
    return create("ul", { class: "differ" }, ...hit.labels.slice(0, most).map((n) => create("li", {}, n)));
  }
  const { more, less } = difference;
  const items = [];
  for (let i = 0; i < Math.max(more.length, less.length); i += 1) {
    if (i < more.length) items.push(create("li", {}, create("ins", {}, `+ ${more[i]}`)));
    if (i < less.length) items.push(create("li", {}, create("del", {}, `− ${less[i]}`)));
  }
  if (!items.length) items.push(create("li", {}, "the same labels"));
  const all = [...more.map((name) => `+ ${name}`), ...less.map((name) => `− ${name}`)];
  return create("ul", { class: "differ", title: all.join("\n") }, ...items.slice(0, most));
}

const score = (hit) => `${SCORES[page.about.metric] ?? "score"} ${hit.score.toPrecision(4)}`;

/** A link that makes a result the query; Ctrl or a middle click opens it in a new tab. */
function link(hit, ...children) {
  const changes = { key: [hit.key], text: "", upload: "" };
  return create("a", {
    href: addressOf({ ...currentQuery(), ...changes }),
    onclick: (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
      event.preventDefault();
      navigate(changes);
    },
  }, ...children);
}

/** Add a sample to the query, which then is the mean of its examples. */
export const addExample = (key) =>
  navigate({ key: [...currentQuery().key.filter((other) => other !== key), key], relation: "neighbours" });

/** A button that adds a result to the query's examples; none for a query by upload or words. */
function addButton(hit) {
  if (!currentQuery().key.length || page.copy) return null;
  return create("button", {
    type: "button", class: "add", tabindex: -1, "data-key": hit.key,
    title: `Add ${hit.key} to the query (key a)`, "aria-label": `Add ${hit.key} to the query`,
    onclick: () => addExample(hit.key),
  }, "+");
}

function grid(answer, compare) {
  const cards = answer.hits.map((hit) => create("li", {},
    link(hit,
      create("span", { class: "views" }, ...pictures(hit.number, "", 152, { loading: "lazy" })),
      ...values(hit.number, answer),
      create("b", { title: hit.key }, hit.key),
      create("span", { class: "measure", title: score(hit) }, hit.score.toPrecision(3))),
    addButton(hit),
    labelList(hit, compare, DIFFERENCES)));
  return create("ol", { class: "grid" }, ...cards);
}

function table(answer, compare) {
  const shown = Object.keys(answer.values).length > 0;
  const head = ["Sample", "Score", "Labels differ", ...(shown ? ["Views"] : []), "Labels"];
  const rows = answer.hits.map((hit) => create("tr", {},
    create("th", { scope: "row" }, link(hit, hit.key), addButton(hit)),
    create("td", { class: "number" }, score(hit)),
    create("td", { class: "number" }, hit.label_distance?.toFixed(2) ?? "–"),
    shown ? create("td", { class: "views" }, ...values(hit.number, answer)) : null,
    create("td", {}, labelList(hit, compare, 50))));
  return create("div", { class: "wide" }, create("table", {},
    create("thead", {}, create("tr", {}, ...head.map((name) => create("th", { scope: "col" }, name)))),
    create("tbody", {}, ...rows)));
}

/** Make one result, with its button, the only Tab stop of all results. */
function setTabStop(links, current) {
  links.forEach((link, i) => {
    const tabIndex = i === current ? 0 : -1;
    link.tabIndex = tabIndex;
    for (const button of link.closest("li, tr").querySelectorAll("button")) button.tabIndex = tabIndex;
  });
}

/** Move the focus between results by arrow keys, along rows and columns; `a` adds a result. */
function moveFocus(event, links, current) {
  const button = links[current].closest("li, tr").querySelector(".add");
  if (event.key === "a" && button && !event.ctrlKey && !event.metaKey && !event.altKey) {
    button.click();
    return;
  }
  const top = (link) => link.getBoundingClientRect().top;
  const below = links.findIndex((link) => top(link) > top(links[0]) + 1);
  const columns = below < 0 ? links.length : below;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  const ends = { Home: 0, End: links.length - 1 };
  const target = ends[event.key] ?? current + (steps[event.key] ?? NaN);
  if (!(target in links)) return;
  event.preventDefault();
  links[target].focus();
}
