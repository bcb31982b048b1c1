// Small charts on canvases: lines over the last minutes, and the last steps as bars.

import { colourOf, fit, short } from "./dom.js";

const [LEAST_SECONDS, MOST_SECONDS] = [30, 600];
const PADDING = { top: 8, right: 4, bottom: 16, left: 50 };

// Draws a line for each of `names`, from samples with a time `at` in seconds. `format` formats the labels of the axis.
// `outages` are times without a service, which are shaded.
export function drawLines(canvas, samples, lines, { format = short, least = 1, outages = [] } = {}) {
  const width = canvas.parentElement.clientWidth, height = 120;
  const context = fit(canvas, width, height);
  const inner = { width: width - PADDING.left - PADDING.right, height: height - PADDING.top - PADDING.bottom };
  const values = samples.flatMap((each) => lines.map(({ name }) => each[name] ?? 0));
  const most = niceAbove(Math.max(least, ...values));
  const end = samples.at(-1)?.at ?? 0;
  const span = Math.min(MOST_SECONDS, Math.max(LEAST_SECONDS, end - (samples[0]?.at ?? 0)));
  const x = (at) => PADDING.left + inner.width * (1 - (end - at) / span);
  const y = (value) => PADDING.top + inner.height * (1 - value / most);
  context.fillStyle = colourOf("--bad");
  context.globalAlpha = 0.16;
  for (const { from, to } of outages) {
    const left = Math.max(PADDING.left, x(from)), right = Math.min(x(to ?? end), PADDING.left + inner.width);
    if (right >= left) context.fillRect(left, PADDING.top, Math.max(3, right - left), inner.height);
  }
  context.globalAlpha = 1;
  drawAxes(context, width, inner, span, most, y, format);
  for (const { name, colour, dash = [] } of lines) {
    context.strokeStyle = colourOf(colour);
    context.lineWidth = 1.75;
    context.setLineDash(dash);
    context.beginPath();
    let isDrawing = false;
    for (const each of samples) {
      const value = each[name];
      if (value === null || value === undefined) isDrawing = false;
      else if (isDrawing) context.lineTo(x(each.at), y(value));
      else {
        context.moveTo(x(each.at), y(value));
        isDrawing = true;
      }
    }
    context.stroke();
  }
  context.setLineDash([]);
}

function drawAxes(context, width, inner, span, most, y, format) {
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colourOf("--muted");
  context.strokeStyle = colourOf("--line");
  context.lineWidth = 1;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const value of [0, most / 2, most]) {
    context.beginPath();
    context.moveTo(PADDING.left, Math.round(y(value)) + 0.5);
    context.lineTo(width - PADDING.right, Math.round(y(value)) + 0.5);
    context.stroke();
    context.fillText(format(value), PADDING.left - 6, y(value));
  }
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  const start = span < 120 ? `${Math.round(span)} s ago` : `${Math.round(span / 60)} min ago`;
  context.fillText(start, PADDING.left, PADDING.top + inner.height + 13);
  context.textAlign = "right";
  context.fillText("now", width - PADDING.right, PADDING.top + inner.height + 13);
}

// A round number of at least `value`.
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((each) => each * power).find((each) => each >= value);
}

// One bar per step: decode tokens below, tokens of prompt chunks above; a mark if the step preempted requests.
export function drawSteps(canvas, steps, budget) {
  const width = canvas.parentElement.clientWidth, height = 110;
  const context = fit(canvas, width, height);
  const step = Math.max(3, Math.floor(width / 120)), count = Math.floor(width / step);
  const shown = steps.slice(-count);
  const most = Math.max(1, Math.min(budget || Infinity, Math.max(1, ...shown.map((each) => each.num_tokens)) * 1.15));
  const scale = (height - 14) / most;
  const colours = { decode: colourOf("--series-1"), chunk: colourOf("--series-2"), bad: colourOf("--series-4") };
  shown.forEach((each, place) => {
    const x = place * step, decodes = each.num_decodes * scale, chunks = each.num_chunk_tokens * scale;
    context.fillStyle = colours.decode;
    context.fillRect(x, height - decodes, step - 1, decodes);
    context.fillStyle = colours.chunk;
    context.fillRect(x, height - decodes - chunks, step - 1, chunks);
    if (each.num_preempted) {
      context.fillStyle = colours.bad;
      context.fillRect(x, 0, step - 1, 8);
    }
  });
  return most;
}
