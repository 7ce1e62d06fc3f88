// The picture of an answer's attention: layers down, positions of the prompt across, on a logarithmic scale of colours.

const MAGMA = ["#000004", "#180f3d", "#440f76", "#721f81", "#9e2f7f", "#cd4071", "#f1605d", "#fd9668", "#feca8d", "#fcfdbf"];
const RANGE = 1e-3; // the darkest colour's part of the brightest's weight
const ROW = 12; // CSS pixels of a layer

function color(weight, most) {
  const share = weight > 0 ? 1 + Math.log(weight / most) / -Math.log(RANGE) : 0;
  const place = Math.min(Math.max(share, 0), 1) * (MAGMA.length - 1);
  const from = MAGMA[Math.floor(place)], to = MAGMA[Math.ceil(place)], part = place % 1;
  const mixed = [1, 3, 5].map((i) => {
    const [a, b] = [from, to].map((name) => parseInt(name.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * part);
  });
  return `rgb(${mixed})`;
}

export class Picture {
  /** Draws on a canvas; `choose` is called with the row and the column of a place that the user selects. */
  constructor(canvas, choose) {
    this.canvas = canvas;
    this.attention = null;
    this.place = null; // [row, column]
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      this.#choose(
        Math.floor(((event.clientY - box.top) / box.height) * this.rows),
        Math.floor(((event.clientX - box.left) / box.width) * this.columns),
        choose,
      );
    });
    canvas.addEventListener("keydown", (event) => {
      const [row, column] = this.place ?? this.brightest();
      const far = event.shiftKey ? 10 : 1;
      const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -far], ArrowRight: [0, far], Enter: [0, 0] };
      const move = moves[event.key];
      if (!move || !this.attention) return;
      event.preventDefault();
      if (event.key === "Enter") this.#choose(row, column, choose);
      else this.#mark(row + move[0], column + move[1]);
    });
    new ResizeObserver(() => this.#paint()).observe(canvas);
  }

  get rows() {
    return this.attention.weights.length;
  }

  get columns() {
    return this.attention.weights[0].length;
  }

  draw(attention) {
    if (this.attention?.weights.length !== attention.weights.length) {
      this.canvas.style.height = `${attention.weights.length * ROW}px`;
    }
    this.attention = attention;
    this.#paint();
  }

  clear() {
    this.attention = this.place = null;
  }

  /** Returns the row and the column of the largest weight. */
  brightest() {
    let best = [0, 0];
    this.attention?.weights.forEach((line, row) =>
      line.forEach((weight, column) => {
        if (weight > this.attention.weights[best[0]][best[1]]) best = [row, column];
      }),
    );
    return best;
  }

  /** Returns the first position of a column, and the one behind its last. */
  positions(column) {
    const tokens = this.attention.prompt_tokens;
    return [column, column + 1].map((i) => Math.floor((i * tokens) / this.columns));
  }

  #choose(row, column, choose) {
    if (!this.attention) return;
    this.#mark(row, column);
    choose(...this.place);
  }

  #mark(row, column) {
    const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
    this.place = [within(row, this.rows), within(column, this.columns)];
    this.#paint();
  }

  #paint() {
    if (!this.attention) return;
    const { canvas, rows, columns } = this;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
    canvas.height = Math.max(1, Math.round(canvas.clientHeight * scale));
    const context = canvas.getContext("2d");
    const width = canvas.width / columns, height = canvas.height / rows;
    const most = Math.max(...this.attention.weights.map((line) => Math.max(...line))) || 1;
    context.fillStyle = MAGMA[0];
    context.fillRect(0, 0, canvas.width, canvas.height);
    this.attention.weights.forEach((line, row) =>
      line.forEach((weight, column) => {
        if (weight <= RANGE * most) return;
        context.fillStyle = color(weight, most);
        const left = Math.floor(column * width);
        context.fillRect(left, Math.floor(row * height), Math.max(scale, Math.ceil((column + 1) * width) - left), Math.ceil(height));
      }),
    );
    if (!this.place) return;
    const [row, column] = this.place;
    context.strokeStyle = "#5fe3ff";
    context.lineWidth = 2 * scale;
    context.strokeRect(column * width - 3 * scale, row * height, width + 6 * scale, height);
  }
}
