/** Drawing on a canvas: lines, arrows and dots, at the screen's resolution and in the colors of the page. */

/** A canvas made as large as it is shown, its context in units of the page, and its size in them. */
export function fitted(/** @type {HTMLCanvasElement} */ canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = globalThis.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)]; // clears it
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width, height };
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number[][]} points
 * @param {string} style
 * @param {number} width
 * @param {number[]} dash
 */
export function line(context, points, style, width, dash = []) {
  Object.assign(context, { strokeStyle: style, lineWidth: width });
  context.setLineDash(dash);
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
  context.setLineDash([]);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number[]} from
 * @param {number[]} along
 * @param {string} style
 * @param {number} width
 */
export function arrow(context, [x, y], [dx, dy], style, width) {
  const length = Math.hypot(dx, dy);
  if (length < 1) return;
  const head = Math.min(length, 3 * width + 3);
  const [ux, uy] = [dx / length, dy / length];
  const neck = [x + dx - head * ux, y + dy - head * uy];
  line(context, [[x, y], neck], style, width);
  context.fillStyle = style;
  context.beginPath();
  context.moveTo(x + dx, y + dy);
  context.lineTo(neck[0] - 0.5 * head * uy, neck[1] + 0.5 * head * ux);
  context.lineTo(neck[0] + 0.5 * head * uy, neck[1] - 0.5 * head * ux);
  context.fill();
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number[]} at
 * @param {number} radius
 * @param {string} fill
 * @param {string} stroke
 */
export function dot(context, [x, y], radius, fill, stroke) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  Object.assign(context, { fillStyle: fill, strokeStyle: stroke, lineWidth: 2 });
  context.fill();
  context.stroke();
}

/** The colors and the font of the page. */
export function looks(element) {
  const style = getComputedStyle(element);
  const named = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  const [r, g, b] = (style.color.match(/[\d.]+/g) || [0, 0, 0]).map(Number);
  const dark = r + g + b > 384; // light words
  return {
    text: style.color,
    soft: named("--jp-ui-font-color2", dark ? "#bbb" : "#555"),
    faint: named("--jp-border-color2", dark ? "#555" : "#ccc"),
    ground: named("--jp-layout-color0", dark ? "#111" : "#fff"),
    dark,
    path: dark ? "#56B4E9" : "#0072B2",
    floor: dark ? "#E69F00" : "#D55E00",
    third: dark ? "#2BBF93" : "#009E73",
    font: `11px ${style.fontFamily}`,
  };
}
