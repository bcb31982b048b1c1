// Colours of sequences: six hues of Okabe and Ito, which people with any kind of colour vision can distinguish, each in
// four shades. Sequences of one request have one hue; requests that run at the same time have different colours while
// colours are left.

const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#b8a800"];
const SHADES = [0, 0.4, -0.4, 0.62];
const REMEMBERED = 256;

function shaded(hex, amount) {
  const target = amount > 0 ? 255 : 0;
  const parts = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  const mixed = parts.map((part) => Math.round(part + (target - part) * Math.abs(amount)));
  return `rgb(${mixed.join(" ")})`;
}

const COLOURS = SHADES.map((amount) => HUES.map((hue) => shaded(hue, amount)));

const linear = (part) => (part <= 10 ? part / 3295 : ((part / 255 + 0.055) / 1.055) ** 2.4);

// Black or white, the one with more contrast to a colour: at least 4.58 for every colour.
function inkFor(colour) {
  const [red, green, blue] = colour.match(/\d+/g).map((part) => linear(Number(part)));
  const light = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return (light + 0.05) / 0.05 > 1.05 / (light + 0.05) ? "#000000" : "#ffffff";
}

const INKS = new Map(COLOURS.flat().map((colour) => [colour, inkFor(colour)]));

export class Palette {
  constructor() {
    this.slots = new Map();
  }

  // The slots of removed requests are free, but a limited number of them is remembered, so that a preempted request
  // returns in its colour.
  keep(requestIds) {
    const taken = new Set();
    for (const id of requestIds) if (this.slots.has(id)) taken.add(this.slots.get(id));
    for (const id of requestIds) {
      if (this.slots.has(id)) continue;
      let slot = 0;
      while (taken.has(slot)) slot += 1;
      taken.add(slot);
      this.slots.set(id, slot);
    }
    for (const id of this.slots.keys()) {
      if (this.slots.size <= REMEMBERED) break;
      if (!requestIds.has(id)) this.slots.delete(id);
    }
  }

  inkOn(sequence) {
    return INKS.get(this.of(sequence));
  }

  of(sequence) {
    const slot = this.slots.get(sequence.request_id) ?? 0;
    const shade = Math.floor(slot / HUES.length) + sequence.sequence_index;
    return COLOURS[shade % SHADES.length][slot % HUES.length];
  }
}
