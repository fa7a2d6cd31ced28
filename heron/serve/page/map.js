// The map: all samples as points, coloured by a label, with the query and the hits marked. An outline
// drawn around points selects them.

import { currentQuery, navigate } from "./address.js";
import { apiUrl, byId, create, formatNumber, page, pictureUrl, request } from "./elements.js";
import { PALETTE, Points } from "./points.js";

const CLICK_RADIUS = 10; // pixels around a point in which a click selects it
const STILL_MS = 150; // after the last movement, until all points are drawn again
const view = { x: 0, y: 0, scale: 1 }; // centre on the grid; CSS pixels per grid step
let points = null;
let positions; // x and y of each sample, on a grid
let marked = { own: [], hits: [] }; // numbers of samples
let outline = []; // corners on the grid of the outline that is being drawn
let drawing = false; // whether the next drag draws an outline
let stillTimer, hoverTimer;
let painted = null; // the address's colour when the points were last coloured; null if that failed
const faults = { sample: "", colours: "" }; // messages of the last requests that failed

const mapBox = () => byId("over").getBoundingClientRect();
const toScreen = (x, y, { width, height } = mapBox()) =>
  [width / 2 + (x - view.x) * view.scale, height / 2 - (y - view.y) * view.scale];
const toGrid = (left, top, { width, height } = mapBox()) =>
  [view.x + (left - width / 2) / view.scale, view.y - (top - height / 2) / view.scale];

/** Fetch the coordinates of the map, or the Error of the request; null if the index has no map. */
export const fetchMap = () => page.about.map
  ? request(apiUrl("map", { of: page.about.of }), {}, "bytes").catch((error) => error) : null;

/** Draw a fetched map: if there are many points, some of them at first, then all. */
export async function startMap(fetched) {
  const { map } = page.about;
  if (!map) {
    setNote("This index has no map; build it again with heron index, without --map none.");
    byId("plane").hidden = true;
    for (const field of byId("map").querySelectorAll(".field")) field.hidden = true;
    return;
  }
  try {
    if (fetched instanceof Error) throw fetched;
    positions = new Uint16Array(fetched);
    resizeCanvases();
    points = new Points(byId("points"), positions);
  } catch (error) {
    setNote(error.message);
    return;
  }
  fitView();
  points.measure(deviceView());
  fillColourMenu();
  listen();
  await colour();
  points.settle();
  performance.mark("map");
  byId("map").dataset.drawn = points.count;
  let observed = false; // an observer reports the initial size at once
  new ResizeObserver(() => { if (observed) { resizeCanvases(); draw(); } observed = true; }).observe(byId("plane"));
}

const setNote = (text) => { byId("map-note").textContent = text; };

/** Say what could not be fetched, by kind; an empty message withdraws it. */
function setFault(kind, message) {
  faults[kind] = message;
  const messages = Object.values(faults).filter(Boolean);
  byId("map-fault").textContent = messages.join("\n");
  byId("map-fault").hidden = !messages.length;
}

/** Fetch the key of a sample; undefined if that fails. */
async function fetchKey(sample) {
  try {
    const { key } = await request(apiUrl(`sample/${sample}`));
    setFault("sample", "");
    return key;
  } catch (error) {
    setFault("sample", error.message);
  }
}

/** Give the canvases as many pixels as they cover on the screen. */
function resizeCanvases() {
  const { width, height } = mapBox();
  for (const canvas of [byId("points"), byId("over")]) {
    canvas.width = Math.max(1, Math.round(width * devicePixelRatio));
    canvas.height = Math.max(1, Math.round(height * devicePixelRatio));
  }
}

/** Set the view to the whole map. */
function fitView() {
  const { width, height } = mapBox();
  let [right, top] = [1, 1];
  for (let i = 0; i < positions.length; i += 2) {
    if (positions[i] > right) right = positions[i];
    if (positions[i + 1] > top) top = positions[i + 1];
  }
  Object.assign(view, { x: right / 2, y: top / 2, scale: 0.94 * Math.min(width / right, height / top) });
}

const deviceView = () => ({ ...view, scale: view.scale * devicePixelRatio });

/** Draw the points and the overlay; after a movement that thinned the points, soon all of them. */
function draw(moving = false) {
  const drawn = points.draw(deviceView(), moving);
  drawOverlay();
  clearTimeout(stillTimer);
  if (moving && drawn < points.count) stillTimer = setTimeout(drawAll, STILL_MS);
  byId("map").dataset.points = drawn;
  const thinned = points.step > 1
    ? ` ${formatNumber(Math.ceil(points.count / points.step))} of them are drawn while it moves.` : "";
  setNote(`${page.about.map.how}. ${formatNumber(points.count)} points.${thinned}`);
}

/** Draw all points, once the map is still. */
function drawAll() {
  draw();
  if (performance.getEntriesByName("whole map").length) return;
  points.settle();
  performance.mark("whole map");
}

/** Draw the regions' names, the outline, the hits and the query over the points. */
function drawOverlay() {
  const pen = byId("over").getContext("2d");
  const box = mapBox();
  const style = getComputedStyle(document.documentElement);
  const [ink, ground, link] = ["--ink", "--ground", "--link"].map((name) => style.getPropertyValue(name));
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.clearRect(0, 0, box.width, box.height);
  const corners = outline.length ? outline : selectedOutline();
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
    pen.arc(...toScreen(positions[2 * sample], positions[2 * sample + 1], box), radius, 0, 7);
    if (fill) pen.fill();
    pen.lineWidth = width + 2;
    pen.strokeStyle = ground;
    pen.stroke();
    pen.lineWidth = width;
    pen.strokeStyle = ink;
    pen.stroke();
  };
  for (const sample of marked.hits) ring(sample, 4, 1.5, false);
  pen.fillStyle = link;
  for (const sample of marked.own) ring(sample, 7, 2.5, true);
  drawRegionNames(pen, box, ink, ground);
}

/** Draw the names of regions, without overlap. */
function drawRegionNames(pen, box, ink, ground) {
  pen.font = "600 12px system-ui, sans-serif";
  pen.textAlign = "center";
  const taken = [];
  for (const { x, y, names: labels } of page.about.map.regions) {
    const [left, top] = toScreen(x, y, box);
    const text = labels.join(", ").slice(0, 40);
    const half = pen.measureText(text).width / 2;
    const middle = Math.min(Math.max(left, half + 4), box.width - half - 4);
    if (left < 0 || left > box.width || top < 12 || top > box.height) continue;
    const overlaps = (name) =>
      Math.abs(name.top - top) < 15 && Math.abs(name.middle - middle) < name.half + half;
    if (taken.some(overlaps)) continue;
    taken.push({ top, middle, half });
    pen.lineWidth = 4;
    pen.strokeStyle = ground;
    pen.strokeText(text, middle, top);
    pen.fillStyle = ink;
    pen.fillText(text, middle, top);
  }
}

/** The corners of the outline in the address. */
function selectedOutline() {
  const numbers = currentQuery().lasso.split(",").map(Number);
  if (numbers.length < 6 || numbers.some(Number.isNaN)) return [];
  return numbers.flatMap((x, i) => (i % 2 ? [] : [[x, numbers[i + 1]]]));
}

/** Mark the query and its hits, and follow the outline and colour in the address. */
export function highlight(query, hits) {
  const own = query?.examples.length ? query.examples : query && query.number !== null ? [query.number] : [];
  marked = { own, hits: hits.map((hit) => hit.number) };
  byId("unlasso").hidden = !currentQuery().lasso;
  byId("over").setAttribute("aria-label",
    `Map of ${formatNumber(page.about?.count ?? 0)} samples; ${marked.hits.length} results are marked`);
  if (!points) return;
  drawOverlay();
  if (painted !== currentQuery().colour) colour();
}

/** List what the points can be coloured by. */
function fillColourMenu() {
  const { exclusive, names } = page.about;
  const usual = exclusive && names.length ? "classes" : "nothing";
  const options = names.map((name, i) => create("option", { value: i }, name));
  byId("colour").replaceChildren(create("option", { value: "" }, usual), ...options);
}

/** Colour the points as the address asks. */
async function colour() {
  const { exclusive, names, classes, of } = page.about;
  const requested = currentQuery().colour;
  painted = requested;
  const label = byId("colour").value = requested in names ? requested : "";
  let colours = [PALETTE[0]], codes = null, legend = [];
  if (label) {
    colours = [PALETTE.at(-1), PALETTE[1]];
    legend = [[PALETTE[1], names[label]], [PALETTE.at(-1), `not ${names[label]}`]];
  } else if (exclusive && names.length) {
    colours = PALETTE;
    legend = classes.map((label, i) => [PALETTE[i], names[label]]);
    if (names.length > classes.length) legend.push([PALETTE.at(-1), "other classes"]);
  }
  try {
    if (legend.length) codes = new Uint8Array(await request(apiUrl("colours", { label, of }), {}, "bytes"));
  } catch (error) {
    if (painted !== requested) return;
    painted = null; // the next query tries again
    setFault("colours", error.message);
    draw(true);
    return;
  }
  if (painted !== requested) return; // another colour has been selected meanwhile
  setFault("colours", "");
  points.paint(codes, colours, label ? 1 : -1);
  byId("legend").replaceChildren(...legend.map(([hex, text]) => {
    const dot = create("i");
    dot.style.background = hex;
    return create("li", {}, dot, text);
  }));
  byId("map").dataset.colour = label || (legend.length ? "classes" : "");
  draw(true);
}

/** The sample nearest to a position on the screen; -1 if none is near. */
function nearest(left, top) {
  const [x, y] = toGrid(left, top);
  let sample = -1, least = (CLICK_RADIUS / view.scale) ** 2;
  for (let i = 0; i < positions.length; i += 2) {
    const distance = (positions[i] - x) ** 2 + (positions[i + 1] - y) ** 2;
    if (distance < least) [sample, least] = [i / 2, distance];
  }
  return sample;
}

/** Zoom by a factor, and move the point at `from` on the screen to `to`. */
function zoom(factor, from = [mapBox().width / 2, mapBox().height / 2], to = from) {
  const [x, y] = toGrid(...from);
  view.scale = Math.min(Math.max(view.scale * factor, 1e-3), 50);
  const [newX, newY] = toGrid(...to);
  view.x += x - newX;
  view.y += y - newY;
  draw(true);
}

const pan = (right, down) => zoom(1, [0, 0], [right, down]);

/** Select the samples in an outline, thinned to as many corners as the server accepts. */
function select(corners) {
  const { corners: limit, grid } = page.about.map;
  const step = Math.ceil(corners.length / limit);
  const bounded = corners.filter((_, i) => i % step === 0).flat()
    .map((value) => Math.round(Math.min(Math.max(value, 0), grid + 1)));
  if (bounded.length >= 6) navigate({ lasso: bounded.join(",") });
}

/** The middle of two positions, and their distance. */
const between = ([[x, y], [otherX, otherY]]) => ({
  middle: [(x + otherX) / 2, (y + otherY) / 2], distance: Math.max(1, Math.hypot(x - otherX, y - otherY)),
});

function listen() {
  const canvas = byId("over");
  let drag = null; // start and last position of a single pointer that is down; null with two
  const pointers = new Map(); // positions of the pointers that are down, at most two, by id
  const position = (event) => [event.offsetX, event.offsetY];
  const setDrawing = (on) => {
    drawing = on;
    byId("lasso").setAttribute("aria-pressed", on);
    canvas.classList.toggle("drawing", on);
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (pointers.size === 2) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, position(event));
    outline = [];
    drag = pointers.size === 1 ? { start: position(event), last: position(event), moved: false } : null;
    if (drag && (drawing || event.shiftKey)) outline = [toGrid(...drag.last)];
  });
  canvas.addEventListener("pointermove", (event) => {
    const current = position(event);
    if (!pointers.has(event.pointerId)) return hover(current);
    const before = pointers.size === 2 && between([...pointers.values()]);
    pointers.set(event.pointerId, current);
    if (before) {
      const after = between([...pointers.values()]);
      return zoom(after.distance / before.distance, before.middle, after.middle);
    }
    const [right, down] = [current[0] - drag.last[0], current[1] - drag.last[1]];
    if (Math.hypot(current[0] - drag.start[0], current[1] - drag.start[1]) > 3) drag.moved = true;
    if (outline.length) {
      if (Math.hypot(right, down) < 4) return;
      outline.push(toGrid(...current));
      drawOverlay();
    } else pan(right, down);
    drag.last = current;
  });
  /** Forget a pointer; of two, the remaining one keeps moving the map, and selects no sample. */
  const lift = (event) => {
    pointers.delete(event.pointerId);
    const [remaining] = pointers.values();
    drag = remaining ? { start: remaining, last: remaining, moved: true } : null;
  };
  canvas.addEventListener("pointerup", async (event) => {
    if (!pointers.has(event.pointerId)) return;
    const { moved } = drag ?? { moved: true };
    lift(event);
    const corners = outline;
    outline = [];
    if (corners.length) {
      setDrawing(false);
      select(corners);
      drawOverlay();
    } else if (!moved) {
      const sample = nearest(...position(event));
      const key = sample >= 0 ? await fetchKey(sample) : undefined;
      if (key !== undefined) navigate({ key: [key], upload: "" });
    }
  });
  canvas.addEventListener("pointercancel", (event) => { lift(event); outline = []; drawOverlay(); });
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 400), position(event));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] };
    if (event.key in steps) pan(...steps[event.key]);
    else if (event.key === "+" || event.key === "=") zoom(1.5);
    else if (event.key === "-") zoom(1 / 1.5);
    else if (event.key === "0") { fitView(); draw(); }
    else return;
    event.preventDefault();
  });
  byId("lasso").addEventListener("click", () => setDrawing(!drawing));
  byId("in-view").addEventListener("click", () => {
    const { width, height } = mapBox();
    select([[0, 0], [width, 0], [width, height], [0, height]].map((corner) => toGrid(...corner)));
  });
  byId("unlasso").addEventListener("click", () => navigate({ lasso: "" }));
  byId("closer").addEventListener("click", () => zoom(1.5));
  byId("farther").addEventListener("click", () => zoom(1 / 1.5));
  byId("whole").addEventListener("click", () => { fitView(); draw(); });
  byId("colour").addEventListener("change", () => navigate({ colour: byId("colour").value }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawOverlay);
}

/** Show the sample under the pointer, once it rests. */
function hover(pointer) {
  clearTimeout(hoverTimer);
  hoverTimer = null;
  byId("under").hidden = true;
  if (!pointer) return;
  const timer = hoverTimer = setTimeout(async () => {
    const sample = nearest(...pointer);
    if (sample < 0) return;
    const key = await fetchKey(sample);
    if (key === undefined || timer !== hoverTimer) return; // the pointer has moved on meanwhile
    const image = page.about.pictures
      ? create("img", { src: pictureUrl(sample), alt: "", width: 72, height: 72 }) : null;
    byId("under").replaceChildren(...[image, create("figcaption", {}, key)].filter(Boolean));
    byId("under").style.left = `${Math.min(pointer[0] + 12, mapBox().width - 90)}px`;
    byId("under").style.top = `${Math.min(pointer[1] + 12, mapBox().height - 100)}px`;
    byId("under").hidden = false;
  }, 120);
}
