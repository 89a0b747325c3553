// Building the page: text only ever becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no #${id}`);
  return found;
}

// element("p", {class: "muted", title: "…"}, "text", child, …)
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// Only touches what changed: a screen reader, a selection or a focus is left in peace.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

// Children of `parent`, one for each item: made once for each key, updated, put in order, removed.
export function keyed(parent, items, keyOf, create, update) {
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const wanted = new Set(items.map((item) => String(keyOf(item))));
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  for (const [key, child] of known) if (!wanted.has(key)) child.remove();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
}

export function announce(text) {
  setText(byId("announcements"), text);
}
