// The address bar is the state: its parameters hold the whole query, so that links can be shared and
// the back button works.

import { page } from "./elements.js";

export const RELATIONS = ["neighbours", "hard", "false"];
export const COUNTS = [12, 24, 48, 96, 200]; // of results
export const state = { counts: COUNTS, show: async () => {} };

/** Limit the choices for the number of results to what the index can give. */
export function limitCounts() {
  const { count: samples, hits = samples } = page.about; // a copy without a server has a number of hits
  state.counts = COUNTS.filter((count) => count < samples && count <= hits);
  if (!state.counts.length) state.counts = [Math.max(1, page.about.count - 1)];
}

const defaultQuery = () => ({
  index: "", key: [], among: "", text: "", upload: "", where: "", relation: "neighbours",
  k: state.counts[1] ?? state.counts[0], lasso: "", colour: "",
});

/** The query in the address; `key` lists the keys of all examples. */
export function currentQuery() {
  const parameters = new URLSearchParams(location.search);
  const query = { ...defaultQuery(), ...Object.fromEntries(parameters), key: parameters.getAll("key") };
  query.key = query.key.filter((key) => key !== "");
  query.k = Number(query.k);
  if (!state.counts.includes(query.k)) query.k = defaultQuery().k;
  if (!RELATIONS.includes(query.relation) || query.key.length > 1) query.relation = "neighbours";
  return query;
}

/** The address of a query; parameters that have their default are left out. */
export function addressOf(query) {
  const values = { ...query, key: query.upload || query.text ? [] : query.key };
  const pairs = Object.entries(defaultQuery()).flatMap(([name, usual]) => {
    if (name === "key") return values.key.map((key) => ["key", key]);
    return values[name] === usual ? [] : [[name, values[name]]];
  });
  return `./?${new URLSearchParams(pairs)}`;
}

/** Change the query, as a new entry of the history. */
export function navigate(changes, upload = changes.key === undefined ? history.state?.upload : undefined) {
  if (changes.key?.length || changes.upload) changes = { text: "", among: "", ...changes };
  history.pushState({ upload }, "", addressOf({ ...currentQuery(), ...changes }));
  return state.show();
}
