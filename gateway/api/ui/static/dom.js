// Elements of the page. Text is always set as text: text of users and models is never parsed as HTML.

export const find = (selector) => document.querySelector(selector);

// An element with properties and with children, which are elements or texts. `dataset` and `style` are objects.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "dataset" || name === "style") Object.assign(element[name], value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Writes rows of texts into a table in place, so that unchanged cells can be selected and copied.
export function fillRows(body, rows, firstTag = "td") {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((texts, place) => {
    const row = body.rows[place] ?? body.insertRow();
    texts.forEach((text, column) => {
      const cell = row.cells[column] ?? row.appendChild(make(column ? "td" : firstTag));
      if (cell.textContent !== text) cell.textContent = text;
    });
  });
}

const WHOLE = new Intl.NumberFormat("en");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });

export const whole = (value) => WHOLE.format(value);
export const percent = (share) => `${Math.round(share * 100)} %`;
export const short = (value) => SHORT.format(value);

export function bytes(count) {
  const power = count < 1024 ? 0 : Math.min(Math.floor(Math.log2(count) / 10), UNITS.length - 1);
  return `${SHORT.format(count / 1024 ** power)} ${UNITS[power]}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${ms > 0 && ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;
}

export const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// Sizes a canvas as it is shown, at the screen's resolution. Returns its context, in CSS pixels.
export function fit(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}
