// The points of a map, drawn by WebGL 2. If drawing all takes longer than a frame at 30 per second,
// only every n-th is drawn while the map moves.

export const PALETTE = [ // of classes; the last colour is for all other classes
  "#3b6fd4", "#e0762c", "#2f9e5b", "#c43d8e", "#8a63c9", "#b08a14", "#1d9aa8", "#d4483b", "#6b8e23",
  "#a0642f", "#5a7a99", "#8d94a1",
];
const UNKNOWN = 255;
const FRAME_MS = 1000 / 30;
const FEW = 20_000; // up to so many points, all are always drawn
// Primes: a step that matches a period of the data would draw only some of the classes.
const STEPS = [1, 2, 3, 7, 13, 31, 61];
const VERTEX = `#version 300 es
in vec2 position; in float code;
uniform vec2 centre, scale; uniform float size, raised; uniform vec3 palette[${PALETTE.length}];
out vec4 colour;
void main() {
  gl_Position = vec4((position - centre) * scale, 0.0, 1.0);
  int number = int(min(code, ${PALETTE.length - 1}.0));
  colour = code == ${UNKNOWN}.0 ? vec4(0.5, 0.5, 0.5, 0.35) : vec4(palette[number], 0.75);
  gl_PointSize = code == raised ? size * 1.25 : size;
}`;
const FRAGMENT = `#version 300 es
precision highp float;
in vec4 colour; uniform float size; out vec4 drawn;
void main() {
  if (size > 2.5 && length(gl_PointCoord - 0.5) > 0.5) discard;
  drawn = vec4(colour.rgb * colour.a, colour.a);
}`;

const rgb = (hex) => [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16) / 255);

/** Draws points in a canvas; `positions` are x and y of each, uint16. */
export class Points {
  constructor(canvas, positions) {
    this.canvas = canvas;
    this.count = positions.length / 2;
    this.step = 1; // while the map moves, every step-th point is drawn
    const gl = canvas.getContext("webgl2", { alpha: true, antialias: false });
    if (!gl) throw new Error("This browser has no WebGL 2, which the map needs.");
    this.gl = gl;
    this.program = this.linkProgram();
    gl.useProgram(this.program);
    this.uniforms = Object.fromEntries(["centre", "scale", "size", "raised", "palette"].map((name) =>
      [name, gl.getUniformLocation(this.program, name)]));
    this.positions = this.createAttribute("position", new Uint16Array(positions));
    this.codes = this.createAttribute("code", new Uint8Array(this.count));
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    this.paint(null, PALETTE);
  }

  linkProgram() {
    const { gl } = this;
    const program = gl.createProgram();
    for (const [type, code] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
      const shader = gl.createShader(type);
      gl.shaderSource(shader, code);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS)) {
      throw new Error(`The map cannot be drawn: ${gl.getProgramInfoLog(program)}`);
    }
    return program;
  }

  createAttribute(name, values) {
    const { gl } = this;
    const attribute = { buffer: gl.createBuffer(), location: gl.getAttribLocation(this.program, name) };
    gl.bindBuffer(gl.ARRAY_BUFFER, attribute.buffer);
    gl.bufferData(gl.ARRAY_BUFFER, values, gl.STATIC_DRAW);
    gl.enableVertexAttribArray(attribute.location);
    return attribute;
  }

  /** Give each point the colour of its code, or without codes the first; `raised` is a code whose
  points are drawn larger. */
  paint(codes, colours, raised = -1) {
    const { gl } = this;
    gl.bindBuffer(gl.ARRAY_BUFFER, this.codes.buffer);
    gl.bufferData(gl.ARRAY_BUFFER, codes ?? new Uint8Array(this.count), gl.STATIC_DRAW);
    const palette = [...colours, ...Array(PALETTE.length).fill(PALETTE.at(-1))].slice(0, PALETTE.length);
    gl.uniform3fv(this.uniforms.palette, palette.flatMap(rgb));
    gl.uniform1f(this.uniforms.raised, raised);
  }

  /** Draw a view, given by its centre on the grid and the device pixels per grid step. */
  draw({ x, y, scale }, moving = false) {
    const { gl, canvas } = this;
    const step = moving ? this.step : 1;
    gl.viewport(0, 0, canvas.width, canvas.height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.uniform2f(this.uniforms.centre, x, y);
    gl.uniform2f(this.uniforms.scale, (2 * scale) / canvas.width, (2 * scale) / canvas.height);
    gl.uniform1f(this.uniforms.size, this.pointSize(scale));
    for (const [attribute, type, bytes, components] of [
      [this.positions, gl.UNSIGNED_SHORT, 4, 2], [this.codes, gl.UNSIGNED_BYTE, 1, 1],
    ]) {
      gl.bindBuffer(gl.ARRAY_BUFFER, attribute.buffer);
      gl.vertexAttribPointer(attribute.location, components, type, false, step === 1 ? 0 : bytes * step, 0);
    }
    const drawn = Math.max(1, Math.floor((this.count - 1) / step) + 1);
    gl.drawArrays(gl.POINTS, 0, drawn);
    return drawn;
  }

  /** The size of a point in pixels: smaller if there are many points, larger when zoomed in. */
  pointSize(scale) {
    const base = 3.2 * devicePixelRatio * Math.min(2, Math.max(0.35, (4000 / this.count) ** 0.25));
    const zoom = Math.sqrt(Math.max(1, (scale * 65535) / Math.max(this.canvas.width, 1)));
    return Math.max(1, Math.min(12 * devicePixelRatio, base * zoom));
  }

  /** Time the drawing of some points, and choose how many are drawn while the map moves. */
  measure(view) {
    if (this.count <= FEW) return;
    this.step = STEPS.find((step) => this.count / step <= FEW) ?? STEPS.at(-1);
    this.draw(view, true);
    this.settle(); // the first time includes compiling the shaders
    const begin = performance.now();
    const drawn = this.draw(view, true);
    this.settle();
    const perPoint = (performance.now() - begin) / drawn;
    this.step = STEPS.find((step) => (perPoint * this.count) / step <= FRAME_MS) ?? STEPS.at(-1);
  }

  /** Wait until everything is drawn. */
  settle() {
    const { gl } = this;
    gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4));
  }
}
