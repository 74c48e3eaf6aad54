// For readers without a mouse or a screen: the theme makes landmarks of copy buttons, names parts of two navigations alike, and keys reach neither code nor tables that scroll.
const HERE = "On this page: ";
const complete = () => {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none");
  for (const nav of document.querySelectorAll(`.md-nav--secondary nav[aria-label]:not([aria-label^="${HERE}"])`)) nav.ariaLabel = HERE + nav.ariaLabel;
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) part.tabIndex = 0;
};
new MutationObserver(complete).observe(document.documentElement, {childList: true, subtree: true});
document.addEventListener("DOMContentLoaded", complete);
