// Trees of elements, and a way to make the document like them that keeps the elements there are: an element with the
// focus keeps it while figures change below.

const SVG = "http://www.w3.org/2000/svg";
const PRIOR = Symbol("attributes that were set here");

export function h(tag, attributes = {}, ...children) {
  const kept = children.flat(2).filter((child) => child !== null && child !== undefined && child !== false);
  return { tag, attributes, children: kept };
}

export function patch(parent, ...trees) {
  const wanted = trees.flat(2).filter((tree) => tree !== null && tree !== undefined && tree !== false);
  wanted.forEach((tree, index) => place(parent, tree, parent.childNodes[index]));
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function place(parent, tree, present) {
  if (typeof tree !== "object") {
    const text = String(tree);
    if (present?.nodeType === Node.TEXT_NODE) {
      if (present.data !== text) present.data = text;
    } else swap(parent, document.createTextNode(text), present);
    return;
  }
  let node = present;
  if (node?.nodeType !== Node.ELEMENT_NODE || node.localName !== tree.tag) {
    node = tree.tag === "svg" || parent.namespaceURI === SVG
      ? document.createElementNS(SVG, tree.tag) : document.createElement(tree.tag);
    swap(parent, node, present);
  }
  setAttributes(node, tree.attributes);
  patch(node, tree.children);
}

function swap(parent, node, present) {
  if (present) present.replaceWith(node);
  else parent.append(node);
}

function setAttributes(node, attributes) {
  const before = node[PRIOR] ?? {};
  for (const name of Object.keys(before)) if (!(name in attributes)) node.removeAttribute(name);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") for (const [property, of] of Object.entries(value)) node.style.setProperty(property, of);
    else if (before[name] !== value) node.setAttribute(name, value);
  }
  node[PRIOR] = attributes;
}

// One stop of the tab key for many marks; arrows go from one to the next.
export function roving(container, selector) {
  container.addEventListener("keydown", (event) => {
    const marks = [...container.querySelectorAll(selector)];
    const at = marks.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: marks.length - 1 };
    if (at < 0 || !(event.key in to)) return;
    event.preventDefault();
    marks[Math.min(Math.max(to[event.key], 0), marks.length - 1)].focus();
  });
}
