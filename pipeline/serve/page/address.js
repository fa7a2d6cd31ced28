// The address is the state: what is asked lies in its parameters, so that a link can be shared and
// the back button works.

import { page } from "./elements.js";

export const RELATIONS = ["neighbours", "hard", "false"];
export const COUNTS = [12, 24, 48, 96, 200]; // of results
export const state = { counts: COUNTS, show: async () => {} };

/** The numbers of results that can be asked for: fewer where there are fewer samples. */
export function limitCounts() {
  state.counts = COUNTS.filter((count) => count < page.about.count);
  if (!state.counts.length) state.counts = [Math.max(1, page.about.count - 1)];
}

const unasked = () => ({
  index: "", key: [], among: "", text: "", upload: "", where: "", relation: "neighbours",
  k: state.counts[1] ?? state.counts[0], lasso: "", colour: "",
});

/** What the address asks for; `key` has the keys of all examples. */
export function asked() {
  const given = new URLSearchParams(location.search);
  const found = { ...unasked(), ...Object.fromEntries(given), key: given.getAll("key") };
  found.key = found.key.filter((key) => key !== "");
  found.k = Number(found.k);
  if (!state.counts.includes(found.k)) found.k = unasked().k;
  if (!RELATIONS.includes(found.relation) || found.key.length > 1) found.relation = "neighbours";
  return found;
}

/** The address of what is asked; what is as it would be anyway is left out. */
export function address(query) {
  const given = { ...query, key: query.upload || query.text ? [] : query.key };
  const pairs = Object.entries(unasked()).flatMap(([name, usual]) => {
    if (name === "key") return given.key.map((key) => ["key", key]);
    return given[name] === usual ? [] : [[name, given[name]]];
  });
  return `/?${new URLSearchParams(pairs)}`;
}

/** Go to another query, as a new entry of the history. */
export function go(changes, upload = changes.key === undefined ? history.state?.upload : undefined) {
  if (changes.key?.length || changes.upload) changes = { text: "", among: "", ...changes };
  history.pushState({ upload }, "", address({ ...asked(), ...changes }));
  return state.show();
}
