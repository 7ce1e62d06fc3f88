// Messages on the page. Text of the model and of files is inserted as text alone, never as HTML.

export function element(name, classes = "", text = "") {
  const made = document.createElement(name);
  made.className = classes;
  made.textContent = text;
  return made;
}

/** Shows text in an element: runs between lines of ``` as code, all else as it is. */
export function showText(parent, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  parts.forEach((part, i) => {
    const isCode = i % 2 === 1;
    const name = isCode ? "PRE" : "DIV";
    if (parent.children[i]?.nodeName !== name) {
      parent.children[i]?.remove();
      parent.insertBefore(isCode ? element("pre") : element("div", "text"), parent.children[i] ?? null);
    }
    const shown = isCode || i === 0 ? part : part.replace(/^\n/, "");
    if (parent.children[i].textContent !== shown) parent.children[i].textContent = shown;
  });
  while (parent.children.length > parts.length) parent.lastChild.remove();
}

/** A message of the user. */
export function userMessage(text, file) {
  const message = element("article", "message user");
  message.setAttribute("aria-label", "You");
  if (file) message.append(element("span", "file", file));
  message.append(element("div", "text", text));
  return message;
}

/** An answer of the model, which grows. */
export class Answer {
  constructor() {
    this.text = this.thoughts = "";
    this.element = element("article", "message model busy");
    this.element.setAttribute("aria-label", "Answer");
    this.body = element("div", "body");
    this.element.append(this.body);
    showText(this.body, "");
  }

  add(text, thoughts) {
    if (thoughts) {
      if (!this.thoughts) {
        const folded = element("details");
        this.thoughtsText = element("div", "text");
        folded.append(element("summary", "", "Thoughts"), this.thoughtsText);
        this.element.prepend(folded);
      }
      this.thoughts += thoughts;
      this.thoughtsText.textContent = this.thoughts;
    }
    if (text) {
      this.text += text;
      showText(this.body, this.text);
    }
  }

  end(cost) {
    this.element.classList.remove("busy");
    if (cost) this.element.append(element("p", "cost", cost));
  }

  fail(message) {
    this.end("");
    this.element.append(element("p", "error", message));
  }
}
