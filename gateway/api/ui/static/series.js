// Numbers over time: one sample per second for the last ten minutes, and the last steps. This module does not use the
// page.

const KEPT_SECONDS = 600;
const KEPT_STEPS = 120;
const COUNTERS = [
  "steps", "computed_tokens", "generated_tokens", "completed_requests", "failed_requests", "preemptions",
];

export class Series {
  constructor() {
    this.samples = [];
    this.steps = [];
    this.before = null;
  }

  // Samples that the gateway took before the page was opened.
  begin(samples) {
    const first = this.samples[0]?.at ?? Infinity;
    this.samples = [...samples.filter(({ at }) => at < first - 1), ...this.samples];
  }

  add(frame) {
    const { numbers, unix_seconds: now } = frame;
    this.addSteps(frame, now);
    const before = this.before;
    // Counters restart after a time without watchers, or with another scheduler.
    const isRestart = before === null || COUNTERS.some((name) => numbers[name] < before.numbers[name]);
    if (!isRestart && now - before.at < 1) return;
    this.before = { at: now, numbers };
    if (isRestart) return;
    const rate = (name) => (numbers[name] - before.numbers[name]) / (now - before.at);
    const pool = numbers.gpu_pool;
    this.samples.push({
      at: now,
      waiting: numbers.waiting_requests,
      running: numbers.running_requests,
      swapped: numbers.swapped_requests,
      rows: numbers.running_sequences,
      generated: rate("generated_tokens"),
      computed: rate("computed_tokens"),
      steps: rate("steps"),
      preemptions: rate("preemptions"),
      used: pool.total_blocks ? pool.used_blocks / pool.total_blocks : 0,
      cached: pool.total_blocks ? pool.cached_blocks / pool.total_blocks : 0,
      ttft50: numbers.first_token_ms_p50,
      ttft95: numbers.first_token_ms_p95,
    });
    while (this.samples[0].at < now - KEPT_SECONDS) this.samples.shift();
  }

  addSteps(frame, now) {
    if (frame.is_whole && this.steps.length && frame.steps.some((each) => each.step_id < this.steps[0].step_id)) {
      this.steps = [];
    }
    for (const step of frame.steps) this.steps.push({ ...step, at: now - step.age_ms / 1000, total_us: null });
    for (const { step_id: id, total_us: total } of frame.answers) {
      const step = this.steps.findLast((each) => each.step_id === id);
      if (step !== undefined) step.total_us = total;
    }
    this.steps.splice(0, this.steps.length - KEPT_STEPS);
  }

  get last() {
    return this.samples.at(-1) ?? null;
  }
}
