// The page of `heron serve`: what the address asks for is fetched and drawn, and what is typed or
// clicked becomes another address.

import { address, asked, go, limitCounts, RELATIONS, state } from "./address.js";
import { api, ask, at, counted, make, page, remember, remembered, source } from "./elements.js";
import { listenForExports, offer } from "./export.js";
import { drawFacets } from "./facets.js";
import { beginMap, fetchMap, light } from "./map.js";
import { drawQuery, listenForFiles, uploads } from "./query.js";
import { drawHits } from "./results.js";

let asking = new AbortController();
let drawnFor = null; // what the query that stands on the page was asked by

/** What the tabs mean. */
const meaning = (relation) => ({
  neighbours: "The samples nearest to the query.",
  hard: "Near the query, yet far from it in label space: what the model confuses.",
  false: `Near the query, with ${page.about.close
    ? `its labels or close ones (a distance of at most ${page.about.close.toFixed(3)})`
    : "the same labels"}: an unsupervised loss pushes these apart wrongly.`,
})[relation];

/** Fetch and draw what the address asks for. */
async function show() {
  const query = asked();
  const { key, text, upload, where, relation, k, lasso } = query;
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  at("key").value = key.length === 1 ? key[0] : "";
  at("text").value = text;
  at("where").value = where;
  at("count").value = k;
  choose(relation, upload || text || key.length > 1);
  at("hits").setAttribute("aria-busy", "true");
  const wanted = JSON.stringify([key, text, upload]);
  try {
    if (!upload && !text && !key.length) {
      const { key: any } = await ask(api("random", { where: query.among }), { signal });
      history.replaceState({}, "", address({ ...query, key: [any] }));
      return show();
    }
    const { answer, picture } = await fetched(query, signal);
    at("fault").hidden = true;
    drawQuery(answer.query, upload, picture);
    drawnFor = wanted;
    drawHits(answer);
    offer(answer);
    light(answer.query, answer.hits);
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message, wanted === drawnFor);
  } finally {
    if (!signal.aborted) {
      at("hits").removeAttribute("aria-busy");
      drawFacets(); // results come first
    }
  }
}

/** The answer to a query, and the address of its picture. */
async function fetched({ key, text, upload, where, relation, k, lasso }, signal) {
  const { about } = page;
  if (upload) {
    const file = uploads.get(history.state?.upload);
    if (!file) throw new Error(`${upload} was uploaded to a page that is gone; choose it again.`);
    if (file.size > about.upload_bytes) {
      const most = counted(about.upload_bytes, "byte");
      throw new Error(`${upload} has ${counted(file.size, "byte")}; at most ${most} are taken.`);
    }
    const headers = { "Content-Type": "application/octet-stream" };
    const sent = { method: "POST", body: file, headers, signal };
    const answer = await ask(api("upload", { where, k, lasso }), sent);
    return { answer, picture: about.pictures ? URL.createObjectURL(file) : null };
  }
  if (text) return { answer: await ask(api("text", { text, where, k, lasso }), { signal }) };
  const answer = await ask(api("neighbours", { key, where, relation, k, lasso }), { signal });
  const { number } = answer.query;
  return { answer, picture: about.pictures && number !== null ? source(number) : null };
}

/** Say what went wrong, and show no results that are not those asked for. */
function fail(message, sameQuery = false) {
  at("fault").textContent = message;
  at("fault").classList.toggle("pointing", message.includes("\n")); // at a character
  at("fault").hidden = false;
  at("query").hidden = !sameQuery;
  at("hits").replaceChildren();
  at("status").textContent = "";
  offer(null);
  light(null, []);
  if (!sameQuery) document.title = "Error · Heron";
}

/** Mark the tab of a relation; what has no labels of its own has the first alone. */
function choose(relation, unlabelled) {
  const { names } = page.about;
  const none = unlabelled || !names.length;
  for (const name of RELATIONS) {
    const tab = at(`tab-${name}`);
    tab.setAttribute("aria-selected", name === relation);
    tab.tabIndex = name === relation ? 0 : -1;
    const off = name !== "neighbours" && none;
    if (off) tab.setAttribute("aria-disabled", "true");
    else tab.removeAttribute("aria-disabled");
    tab.title = off ? reason(unlabelled) : "";
  }
  at("panel").setAttribute("aria-labelledby", `tab-${relation}`);
  at("meaning").textContent = meaning(relation)
    + (none ? ` ${reason(unlabelled)}` : " + marks labels that the query lacks, − those that it has instead.");
}

const reason = (unlabelled) => unlabelled
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
  const { about } = page;
  at("data").textContent = about.data;
  const facts = {
    Index: about.kind, Metric: about.metric.replace("_", " "),
    Samples: about.count.toLocaleString("en"),
    Layer: `${about.layer}, ${about.dim} dimensions`, Recall: about.recall,
  };
  at("about").replaceChildren(...Object.entries(facts).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  limitCounts();
  at("count").replaceChildren(...state.counts.map((count) => make("option", { value: count }, `${count}`)));
  at("file").accept = about.pictures ? "image/jpeg,image/png" : ".npy";
  at("upload-note").textContent = (about.pictures ? "chosen, dropped or pasted: a JPEG or PNG" : "an .npy file, one row")
    + ` of at most ${Math.floor(about.upload_bytes / 1e6)} MB`;
  const [first, second] = about.names;
  at("where-note").textContent = second
    ? `Labels with and, or, not and parentheses, such as: ${first} and not ${second}.` : "";
  at("text-field").hidden = !about.texts;
  at("indexes").hidden = about.indexes.length < 2;
  at("index").replaceChildren(...about.indexes.map((name) => make("option", { value: name }, name)));
  at("index").value = asked().index || about.indexes[0];
  at("facets").open = matchMedia("(min-width: 60rem)").matches;
  resize(remembered("size", at("size").value));
}

/** Draw the pictures of the results as large as the slider says. */
function resize(pixels) {
  at("size").value = pixels;
  at("hits").style.setProperty("--size", `${Number(at("size").value)}px`);
  remember("size", at("size").value);
}

let typing;
function suggest() {
  clearTimeout(typing);
  typing = setTimeout(async () => {
    try {
      const { keys } = await ask(api("samples", { part: at("key").value }));
      at("keys").replaceChildren(...keys.map((key) => make("option", { value: key })));
    } catch {
      at("keys").replaceChildren(); // a suggestion less; what is shown says what went wrong
    }
  }, 120);
}

/** Ask for the sample whose key was typed, or for the only one whose key has what was typed. */
async function pick() {
  const typed = at("key").value.trim();
  const { keys } = await ask(api("samples", { part: typed })).catch(() => ({ keys: [] }));
  go({ key: [keys.length === 1 ? keys[0] : typed], upload: "" });
}

function listen() {
  const on = (id, type, act) => at(id).addEventListener(type, (event) => {
    if (type === "submit") event.preventDefault(); // the page shows the answer itself
    act();
  });
  on("key", "input", suggest);
  on("key", "focus", suggest);
  on("pick", "submit", pick);
  const find = () => go({ key: [], upload: "", relation: "neighbours", text: at("text").value.trim() });
  on("find", "click", find);
  at("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // or the form would ask for the key
    find();
  });
  on("random", "click", () => go({ key: [], text: "", upload: "" })); // without a key any is shown
  on("narrow", "submit", () => go({ where: at("where").value.trim() }));
  on("clear", "click", () => go({ where: "", lasso: "" }));
  on("count", "change", () => go({ k: Number(at("count").value) }));
  on("size", "input", () => resize(at("size").value));
  on("index", "change", () => location.assign(`/?${new URLSearchParams({ index: at("index").value })}`));
  for (const name of RELATIONS) {
    const tab = at(`tab-${name}`);
    tab.addEventListener("keydown", tabKeys);
    tab.addEventListener("click", () => {
      if (tab.getAttribute("aria-disabled") !== "true") go({ relation: name });
      else at("status").textContent = tab.title;
    });
  }
  listenForFiles();
  listenForExports();
  addEventListener("popstate", show);
}

/** Find the API of the index that the address names. */
async function open() {
  page.about = await ask(api("about"));
  const name = asked().index;
  if (!name || name === page.about.indexes[0]) return;
  const place = page.about.indexes.indexOf(name);
  const { indexes } = page.about;
  if (place < 0) throw new Error(`No index is called '${name}'; found ${indexes.join(", ")}.`);
  page.base = `/api/${place}`;
  page.about = await ask(api("about"));
}

try {
  await open();
  introduce();
  listen();
  state.show = show;
  await show();
  performance.mark("results");
  await beginMap(await fetchMap());
} catch (error) {
  fail(error.message);
}
