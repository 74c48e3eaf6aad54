// For readers without a mouse or a screen: the theme makes a landmark of every copy button, and keys reach neither code nor tables that scroll.
const complete = () => {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none");
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) part.tabIndex = 0;
};
new MutationObserver(complete).observe(document.documentElement, {childList: true, subtree: true});
document.addEventListener("DOMContentLoaded", complete);
