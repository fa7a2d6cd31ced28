// The map: all samples as points, coloured by a label, with the query and the hits lit; an outline
// that is drawn round some of them selects these.

import { asked, go } from "./address.js";
import { api, ask, at, make, number, page, source } from "./elements.js";
import { PALETTE, Points } from "./points.js";

const NEAR = 10; // pixels about a point in which a click means it
const STILL_MS = 150; // after which all points are drawn again
const view = { x: 0, y: 0, scale: 1 }; // the centre on the grid; CSS pixels of a step of the grid
let points = null;
let places; // x and y of each sample, on a grid
let lit = { own: [], hits: [] }; // numbers of samples
let outline = []; // corners on the grid, while one is drawn
let drawing = false; // an outline, at the next drag
let resting, hovering;
let painted = null; // the colour that the address had

const size = () => at("over").getBoundingClientRect();
const toScreen = (x, y, { width, height } = size()) =>
  [width / 2 + (x - view.x) * view.scale, height / 2 - (y - view.y) * view.scale];
const toGrid = (left, top, { width, height } = size()) =>
  [view.x + (left - width / 2) / view.scale, view.y - (top - height / 2) / view.scale];

/** Fetch the coordinates of the map, where there is one. */
export const fetchMap = () => page.about.map
  ? ask(api("map", { of: page.about.of }), {}, "bytes").catch((error) => error) : null;

/** Draw a map that was fetched: some of its points at first where all take long, then all. */
export async function beginMap(fetched) {
  const { map } = page.about;
  if (!map) {
    tell("This index has no map; build it again with heron index, which draws one.");
    at("plane").hidden = true;
    for (const one of at("map").querySelectorAll(".field")) one.hidden = true;
    return;
  }
  try {
    if (fetched instanceof Error) throw fetched;
    places = new Uint16Array(fetched);
    fit();
    points = new Points(at("points"), places);
  } catch (error) {
    tell(error.message);
    return;
  }
  whole();
  points.measure(deviceView());
  choices();
  listen();
  await colour();
  points.settle();
  performance.mark("map");
  at("map").dataset.drawn = points.count;
  let begun = false; // an observer tells of the size that there is at once
  new ResizeObserver(() => { if (begun) { fit(); draw(); } begun = true; }).observe(at("plane"));
}

const tell = (text) => { at("map-note").textContent = text; };

/** Give the canvases as many pixels as they have on the screen. */
function fit() {
  const { width, height } = size();
  for (const canvas of [at("points"), at("over")]) {
    canvas.width = Math.max(1, Math.round(width * devicePixelRatio));
    canvas.height = Math.max(1, Math.round(height * devicePixelRatio));
  }
}

/** Show the whole map. */
function whole() {
  const { width, height } = size();
  let [right, top] = [1, 1];
  for (let i = 0; i < places.length; i += 2) {
    if (places[i] > right) right = places[i];
    if (places[i + 1] > top) top = places[i + 1];
  }
  Object.assign(view, { x: right / 2, y: top / 2, scale: 0.94 * Math.min(width / right, height / top) });
}

const deviceView = () => ({ ...view, scale: view.scale * devicePixelRatio });

/** Draw points and what lies over them; soon after the last movement all of them. */
function draw(moving = false) {
  const drawn = points.draw(deviceView(), moving);
  over();
  clearTimeout(resting);
  if (moving && drawn < points.count) resting = setTimeout(rest, STILL_MS);
  at("map").dataset.points = drawn;
  const thinned = points.step > 1
    ? ` While it moves ${number(Math.ceil(points.count / points.step))} of them are drawn.` : "";
  tell(`${page.about.map.how}. ${number(points.count)} points.${thinned}`);
}

/** Draw all points, once the map is still. */
function rest() {
  draw();
  if (performance.getEntriesByName("whole map").length) return;
  points.settle();
  performance.mark("whole map");
}

/** Draw regions' names, the outline, the hits and the query. */
function over() {
  const pen = at("over").getContext("2d");
  const box = size();
  const style = getComputedStyle(document.documentElement);
  const [ink, ground, link] = ["--ink", "--ground", "--link"].map((name) => style.getPropertyValue(name));
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.clearRect(0, 0, box.width, box.height);
  const corners = outline.length ? outline : kept();
  if (corners.length) {
    pen.beginPath();
    for (const [x, y] of corners) pen.lineTo(...toScreen(x, y, box));
    if (!outline.length) pen.closePath();
    pen.strokeStyle = link;
    pen.lineWidth = 2;
    pen.stroke();
  }
  const ring = (sample, radius, width, fill) => {
    pen.beginPath();
    pen.arc(...toScreen(places[2 * sample], places[2 * sample + 1], box), radius, 0, 7);
    if (fill) pen.fill();
    pen.lineWidth = width + 2;
    pen.strokeStyle = ground;
    pen.stroke();
    pen.lineWidth = width;
    pen.strokeStyle = ink;
    pen.stroke();
  };
  for (const sample of lit.hits) ring(sample, 4, 1.5, false);
  pen.fillStyle = link;
  for (const sample of lit.own) ring(sample, 7, 2.5, true);
  names(pen, box, ink, ground);
}

/** Write the names of regions, none over another. */
function names(pen, box, ink, ground) {
  pen.font = "600 12px system-ui, sans-serif";
  pen.textAlign = "center";
  const taken = [];
  for (const { x, y, names: labels } of page.about.map.regions) {
    const [left, top] = toScreen(x, y, box);
    const text = labels.join(", ").slice(0, 40);
    const half = pen.measureText(text).width / 2;
    const middle = Math.min(Math.max(left, half + 4), box.width - half - 4);
    if (left < 0 || left > box.width || top < 12 || top > box.height) continue;
    if (taken.some((one) => Math.abs(one.top - top) < 15 && Math.abs(one.middle - middle) < one.half + half)) continue;
    taken.push({ top, middle, half });
    pen.lineWidth = 4;
    pen.strokeStyle = ground;
    pen.strokeText(text, middle, top);
    pen.fillStyle = ink;
    pen.fillText(text, middle, top);
  }
}

/** The corners of the outline that the address has. */
function kept() {
  const numbers = asked().lasso.split(",").map(Number);
  if (numbers.length < 6 || numbers.some(Number.isNaN)) return [];
  return numbers.flatMap((x, i) => (i % 2 ? [] : [[x, numbers[i + 1]]]));
}

/** Light the query and its hits, and follow the address. */
export function light(query, hits) {
  const own = query?.examples.length ? query.examples : query && query.number !== null ? [query.number] : [];
  lit = { own, hits: hits.map((hit) => hit.number) };
  at("unlasso").hidden = !asked().lasso;
  at("over").setAttribute("aria-label",
    `Map of ${number(page.about?.count ?? 0)} samples; ${lit.hits.length} results are marked`);
  if (!points) return;
  over();
  if (painted !== asked().colour) colour();
}

/** What the points can be coloured by. */
function choices() {
  const { exclusive, names } = page.about;
  const usual = exclusive && names.length ? "classes" : "nothing";
  const options = names.map((name, place) => make("option", { value: place }, name));
  at("colour").replaceChildren(make("option", { value: "" }, usual), ...options);
}

/** Colour the points as the address asks. */
async function colour() {
  const { exclusive, names, classes, of } = page.about;
  const chosen = asked().colour;
  painted = chosen;
  at("colour").value = chosen in names ? chosen : "";
  const label = at("colour").value;
  let colours = [PALETTE[0]], codes = null, legend = [];
  if (label) {
    colours = [PALETTE.at(-1), PALETTE[1]];
    legend = [[PALETTE[1], names[label]], [PALETTE.at(-1), `not ${names[label]}`]];
  } else if (exclusive && names.length) {
    colours = PALETTE;
    legend = classes.map((place, i) => [PALETTE[i], names[place]]);
    if (names.length > classes.length) legend.push([PALETTE.at(-1), "other classes"]);
  }
  try {
    if (legend.length) codes = new Uint8Array(await ask(api("colours", { label, of }), {}, "bytes"));
  } catch (error) {
    tell(error.message);
    return;
  }
  points.paint(codes, colours, label ? 1 : -1);
  at("legend").replaceChildren(...legend.map(([hex, text]) => {
    const dot = make("i");
    dot.style.background = hex;
    return make("li", {}, dot, text);
  }));
  at("map").dataset.colour = label || (legend.length ? "classes" : "");
  draw(true);
}

/** The sample nearest to a place on the screen, or -1. */
function nearest(left, top) {
  const [x, y] = toGrid(left, top);
  let found = -1, least = (NEAR / view.scale) ** 2;
  for (let i = 0; i < places.length; i += 2) {
    const apart = (places[i] - x) ** 2 + (places[i + 1] - y) ** 2;
    if (apart < least) [found, least] = [i / 2, apart];
  }
  return found;
}

/** Come closer; what was at one place on the screen lies at another then. */
function zoom(times, from = [size().width / 2, size().height / 2], to = from) {
  const [x, y] = toGrid(...from);
  view.scale = Math.min(Math.max(view.scale * times, 1e-3), 50);
  const [now, then] = toGrid(...to);
  view.x += x - now;
  view.y += y - then;
  draw(true);
}

const pan = (right, down) => zoom(1, [0, 0], [right, down]);

/** Select what lies in an outline, of as many corners as the server takes. */
function select(corners) {
  const { corners: most, grid } = page.about.map;
  const step = Math.ceil(corners.length / most);
  const bounded = corners.filter((_, i) => i % step === 0).flat()
    .map((value) => Math.round(Math.min(Math.max(value, 0), grid + 1)));
  if (bounded.length >= 6) go({ lasso: bounded.join(",") });
}

/** The middle of two places, and how far they are apart. */
const between = ([[x, y], [right, down]]) =>
  ({ middle: [(x + right) / 2, (y + down) / 2], apart: Math.max(1, Math.hypot(x - right, y - down)) });

function listen() {
  const canvas = at("over");
  let held = null; // where the pointer went down, and where it is; null while two are down
  const down = new Map(); // where the pointers are that are down, two at most, by their ids
  const place = (event) => [event.offsetX, event.offsetY];
  const arm = (on) => {
    drawing = on;
    at("lasso").setAttribute("aria-pressed", on);
    canvas.classList.toggle("drawing", on);
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (down.size === 2) return;
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, place(event));
    outline = [];
    held = down.size === 1 ? { from: place(event), last: place(event), moved: false } : null;
    if (held && (drawing || event.shiftKey)) outline = [toGrid(...held.last)];
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = place(event);
    if (!down.has(event.pointerId)) return hover(now);
    const before = down.size === 2 && between([...down.values()]);
    down.set(event.pointerId, now);
    if (before) {
      const after = between([...down.values()]);
      return zoom(after.apart / before.apart, before.middle, after.middle);
    }
    const [right, below] = [now[0] - held.last[0], now[1] - held.last[1]];
    if (Math.hypot(now[0] - held.from[0], now[1] - held.from[1]) > 3) held.moved = true;
    if (outline.length) {
      if (Math.hypot(right, below) < 4) return;
      outline.push(toGrid(...now));
      over();
    } else pan(right, below);
    held.last = now;
  });
  /** Forget a pointer; one that is left of two moves the map on, and picks nothing. */
  const lift = (event) => {
    down.delete(event.pointerId);
    const [left] = down.values();
    held = left ? { from: left, last: left, moved: true } : null;
  };
  canvas.addEventListener("pointerup", async (event) => {
    if (!down.has(event.pointerId)) return;
    const { moved } = held ?? { moved: true };
    lift(event);
    const corners = outline;
    outline = [];
    if (corners.length) {
      arm(false);
      select(corners);
      over();
    } else if (!moved) {
      const found = nearest(...place(event));
      if (found >= 0) go({ key: [(await ask(api(`sample/${found}`))).key], upload: "" });
    }
  });
  canvas.addEventListener("pointercancel", (event) => { lift(event); outline = []; over(); });
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 400), place(event));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] };
    if (event.key in steps) pan(...steps[event.key]);
    else if (event.key === "+" || event.key === "=") zoom(1.5);
    else if (event.key === "-") zoom(1 / 1.5);
    else if (event.key === "0") { whole(); draw(); }
    else return;
    event.preventDefault();
  });
  at("lasso").addEventListener("click", () => arm(!drawing));
  at("in-view").addEventListener("click", () => {
    const { width, height } = size();
    select([[0, 0], [width, 0], [width, height], [0, height]].map((corner) => toGrid(...corner)));
  });
  at("unlasso").addEventListener("click", () => go({ lasso: "" }));
  at("closer").addEventListener("click", () => zoom(1.5));
  at("farther").addEventListener("click", () => zoom(1 / 1.5));
  at("whole").addEventListener("click", () => { whole(); draw(); });
  at("colour").addEventListener("change", () => go({ colour: at("colour").value }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", over);
}

/** Show the sample under the pointer, once it rests. */
function hover(where) {
  clearTimeout(hovering);
  hovering = null;
  at("under").hidden = true;
  if (!where) return;
  const mine = hovering = setTimeout(async () => {
    const found = nearest(...where);
    if (found < 0) return;
    const { key } = await ask(api(`sample/${found}`));
    if (mine !== hovering) return; // the pointer has moved on meanwhile
    const image = page.about.pictures ? make("img", { src: source(found), alt: "", width: 72, height: 72 }) : null;
    at("under").replaceChildren(...[image, make("figcaption", {}, key)].filter(Boolean));
    at("under").style.left = `${Math.min(where[0] + 12, size().width - 90)}px`;
    at("under").style.top = `${Math.min(where[1] + 12, size().height - 100)}px`;
    at("under").hidden = false;
  }, 120);
}
