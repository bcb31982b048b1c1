// The choice of the shown blocks of a large pool: groups with blocks in use. This module does not use the page.

const GROUP = 16;
const MIN_BLOCKS = 96;
export const ZOOM_ABOVE = 1024;

export class Zoom {
  constructor() {
    this.isWhole = false;
    this.groups = new Set();
    this.size = 0;
    this.blocks = null;
  }

  // The numbers of the blocks to show, in order; null for all of them. Without a change, the same array as before.
  of(pool) {
    if (pool.size !== this.size) Object.assign(this, { size: pool.size, groups: new Set(), blocks: null });
    if (this.isWhole || pool.size <= ZOOM_ABOVE) return (this.blocks = null);
    const needed = new Set();
    for (let block = 0; block < pool.size; block += 1) if (pool.refs[block]) needed.add(Math.floor(block / GROUP));
    // Groups stay while their blocks change, so that the picture is stable, until most of them are idle.
    const least = MIN_BLOCKS / GROUP, isFew = this.groups.size > 3 * Math.max(needed.size, least);
    const shown = isFew ? new Set(needed) : new Set([...this.groups, ...needed]);
    for (let group = 0; shown.size < Math.min(least, pool.size / GROUP); group += 1) shown.add(group);
    const isSame = this.blocks !== null && shown.size === this.groups.size && [...shown].every(
      (each) => this.groups.has(each),
    );
    if (isSame) return this.blocks;
    this.groups = shown;
    const ordered = [...shown].sort((a, b) => a - b);
    this.blocks = Int32Array.from(
      ordered.flatMap((group) => Array.from({ length: GROUP }, (_, index) => group * GROUP + index)),
    ).filter((block) => block < pool.size);
    return this.blocks;
  }
}
