// The page of `heron serve`: the query in the address is fetched and drawn, and what is typed or
// clicked becomes another address.

import { addressOf, currentQuery, limitCounts, navigate, RELATIONS, state } from "./address.js";
import { apiUrl, byId, countOf, create, loadSetting, page, request, saveSetting } from "./elements.js";
import { listenForExports, updateExports } from "./export.js";
import { drawFacets } from "./facets.js";
import { fetchMap, highlight, startMap } from "./map.js";
import { drawQuery, listenForFiles, updateZones, uploads } from "./query.js";
import { drawHits } from "./results.js";

let pending = new AbortController(); // of the last query
let drawnQuery = null; // the key, text and upload of the query that is on the page, as JSON

/** What a tab shows. */
const meaning = (relation) => ({
  neighbours: "The samples nearest to the query.",
  hard: "Near the query but far from it in label space: samples that the model confuses.",
  false: `Near the query, with ${page.about.close
    ? `its labels or close ones (a distance of at most ${page.about.close.toFixed(3)})`
    : "the same labels"}: an unsupervised loss pushes these apart wrongly.`,
})[relation];

/** Fetch and draw the answer to the query in the address. */
async function show() {
  const query = currentQuery();
  const { key, text, upload, where, relation, k } = query;
  pending.abort();
  pending = new AbortController();
  const { signal } = pending;
  byId("key").value = key.length === 1 ? key[0] : "";
  byId("text").value = text;
  byId("where").value = where;
  byId("count").value = k;
  selectTab(relation, upload || text || key.length > 1);
  byId("hits").setAttribute("aria-busy", "true");
  const queryId = JSON.stringify([key, text, upload]);
  try {
    if (!upload && !text && !key.length) {
      const { key: random } = await request(apiUrl("random", { where: query.among }), { signal });
      history.replaceState({}, "", addressOf({ ...query, key: [random] }));
      return show();
    }
    const { answer, pictures } = await fetchAnswer(query, signal);
    byId("fault").hidden = true;
    drawQuery(answer, upload, pictures);
    updateZones();
    drawnQuery = queryId;
    drawHits(answer);
    updateExports(answer);
    highlight(answer.query, answer.hits);
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message, queryId === drawnQuery);
  } finally {
    if (!signal.aborted) {
      byId("hits").removeAttribute("aria-busy");
      drawFacets(); // after the results, which matter more
    }
  }
}

/** Fetch the answer to a query, with views and URLs of the pictures that are uploaded. */
async function fetchAnswer({ key, text, upload, where, relation, k, lasso }, signal) {
  const { about } = page;
  if (upload) {
    const given = uploads.get(history.state?.upload);
    if (!given) throw new Error(`${upload} was uploaded from a page that has been closed; choose it again.`);
    const views = [...given.keys()], files = [...given.values()], sizes = files.map((file) => file.size);
    const bytes = sizes.reduce((sum, size) => sum + size);
    if (bytes > about.upload_bytes) {
      const limit = countOf(about.upload_bytes, "byte");
      throw new Error(`${upload} has ${countOf(bytes, "byte")}, and the limit is ${limit}.`);
    }
    const headers = { "Content-Type": "application/octet-stream" };
    const options = { method: "POST", body: new Blob(files), headers, signal };
    const parts = views[0] ? { view: views, size: sizes } : {};
    const answer = await request(apiUrl("upload", { where, k, lasso, ...parts }), options);
    const shown = [...given].filter(([view]) => !view || about.picture_views.includes(view));
    const pictures = about.pictures ? shown.map(([view, file]) => ({ view, url: URL.createObjectURL(file) })) : [];
    return { answer, pictures };
  }
  if (text) return { answer: await request(apiUrl("text", { text, where, k, lasso }), { signal }) };
  return { answer: await request(apiUrl("neighbours", { key, where, relation, k, lasso }), { signal }) };
}

/** Say what went wrong; clear the results if they belong to another query, not to another filter. */
function fail(message, sameQuery = false) {
  byId("fault").textContent = message;
  byId("fault").classList.toggle("pointing", message.includes("\n")); // points at a character
  byId("fault").hidden = false;
  if (sameQuery) {
    byId("status").textContent = "These are the previous results.";
    return;
  }
  byId("query").hidden = true;
  byId("hits").replaceChildren();
  byId("status").textContent = "";
  updateExports(null);
  highlight(null, []);
  drawnQuery = null;
  document.title = "Error · Heron";
}

/** Select the tab of a relation; without labels, only the first tab is enabled. */
function selectTab(relation, unlabelled) {
  const { names } = page.about;
  const noLabels = unlabelled || !names.length;
  for (const name of RELATIONS) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", name === relation);
    tab.tabIndex = name === relation ? 0 : -1;
    const disabled = name !== "neighbours" && noLabels;
    if (disabled) tab.setAttribute("aria-disabled", "true");
    else tab.removeAttribute("aria-disabled");
    tab.title = disabled ? reason(unlabelled) : "";
  }
  byId("panel").setAttribute("aria-labelledby", `tab-${relation}`);
  byId("meaning").textContent = meaning(relation)
    + (noLabels ? ` ${reason(unlabelled)}`
      : " + marks labels that the query lacks, − labels that only the query has.");
}

/** Why there are no hard and no false negatives. */
const reason = (unlabelled) => unlabelled
  ? "The query has no labels, so it has no hard or false negatives."
  : "These samples have no labels, so there are no hard or false negatives.";

/** Move the focus between tabs by arrow keys; Enter or Space, as on any button, opens one. */
function moveTabFocus(event) {
  const tabs = RELATIONS.map((name) => byId(`tab-${name}`));
  const current = tabs.indexOf(event.target);
  const target = {
    ArrowRight: (current + 1) % 3, ArrowLeft: (current + 2) % 3, Home: 0, End: 2,
  }[event.key];
  if (target === undefined) return;
  event.preventDefault();
  tabs[target].focus();
}

/** Describe the index, and set up the controls for it. */
function describeIndex() {
  const { about } = page;
  byId("data").textContent = about.data;
  const facts = {
    Index: about.kind, Metric: about.metric.replace("_", " "),
    Samples: about.count.toLocaleString("en"),
    Layer: `${about.layer}, ${about.dim} dimensions`, Recall: about.recall,
  };
  byId("about").replaceChildren(...Object.entries(facts).map(([name, value]) =>
    create("div", {}, create("dt", {}, name), create("dd", {}, value))));
  limitCounts();
  byId("count").replaceChildren(...state.counts.map((count) => create("option", { value: count }, `${count}`)));
  const [first, second] = about.names;
  byId("where-note").textContent = second
    ? `Labels with and, or, not and parentheses, for example: ${first} and not ${second}.` : "";
  byId("text-field").hidden = !about.texts;
  // What needs a search of its own is not on a copy without a server.
  for (const id of ["upload-field", "where-field", "lasso", "in-view", "keys-csv", "keys-json"]) byId(id).hidden = page.copy !== null;
  byId("indexes").hidden = about.indexes.length < 2;
  byId("index").replaceChildren(...about.indexes.map((name) => create("option", { value: name }, name)));
  byId("index").value = currentQuery().index || about.indexes[0];
  byId("facets").open = matchMedia("(min-width: 60rem)").matches;
  resize(loadSetting("size", byId("size").value));
}

/** Draw the pictures of the results as large as the slider says. */
function resize(pixels) {
  byId("size").value = pixels;
  byId("hits").style.setProperty("--size", `${Number(byId("size").value)}px`);
  saveSetting("size", byId("size").value);
}

let typing, suggesting = new AbortController();
function suggest() {
  clearTimeout(typing);
  suggesting.abort();
  suggesting = new AbortController();
  const { signal } = suggesting;
  typing = setTimeout(async () => {
    try {
      const { keys } = await request(apiUrl("samples", { part: byId("key").value }), { signal });
      byId("keys").replaceChildren(...keys.map((key) => create("option", { value: key })));
    } catch (error) {
      if (error.name !== "AbortError") byId("keys").replaceChildren(); // a query would report the fault
    }
  }, 120);
}

/** Query the sample whose key was typed, or the only one whose key contains what was typed. */
async function queryTypedKey() {
  const typed = byId("key").value.trim();
  const { keys } = await request(apiUrl("samples", { part: typed })).catch(() => ({ keys: [] }));
  navigate({ key: [keys.length === 1 ? keys[0] : typed], upload: "" });
}

function listen() {
  const on = (id, type, act) => byId(id).addEventListener(type, (event) => {
    if (type === "submit") event.preventDefault(); // the page shows the answer itself
    act();
  });
  on("key", "input", suggest);
  on("key", "focus", suggest);
  on("pick", "submit", queryTypedKey);
  const find = () => navigate({ key: [], upload: "", relation: "neighbours", text: byId("text").value.trim() });
  on("find", "click", find);
  byId("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // otherwise the form would query the key
    find();
  });
  on("random", "click", () => navigate({ key: [], text: "", upload: "" })); // no key: any sample
  on("narrow", "submit", () => navigate({ where: byId("where").value.trim() }));
  on("clear", "click", () => navigate({ where: "", lasso: "" }));
  on("count", "change", () => navigate({ k: Number(byId("count").value) }));
  on("size", "input", () => resize(byId("size").value));
  on("index", "change", () => location.assign(`./?${new URLSearchParams({ index: byId("index").value })}`));
  for (const name of RELATIONS) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("keydown", moveTabFocus);
    tab.addEventListener("click", () => {
      if (tab.getAttribute("aria-disabled") !== "true") navigate({ relation: name });
      else byId("status").textContent = tab.title;
    });
  }
  if (!page.copy) listenForFiles();
  listenForExports();
  addEventListener("popstate", show);
}

/** Open the index that the address names. */
async function openIndex() {
  if (document.body.dataset.static !== undefined) page.copy = await import("./static.js");
  page.about = await request(apiUrl("about"));
  const name = currentQuery().index;
  if (!name || name === page.about.indexes[0]) return;
  const { indexes } = page.about;
  const number = indexes.indexOf(name);
  if (number < 0) throw new Error(`No index named '${name}'. The indexes are ${indexes.join(", ")}.`);
  page.base = `api/${number}`;
  page.about = await request(apiUrl("about"));
}

try {
  await openIndex();
  describeIndex();
  listen();
  state.show = show;
  await show();
  performance.mark("results");
  await startMap(await fetchMap());
} catch (error) {
  fail(error.message);
}
