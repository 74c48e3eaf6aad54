// A Worker for a page that is opened as a file, where browsers allow none: its script runs in a hidden frame. The search needs it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) =>
        setTimeout(() => {
          const event = new MessageEvent("message", { data });
          this.onmessage?.(event);
          this.dispatchEvent(event);
        });
      const script = inner.document.createElement("script");
      this.loaded = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
      });
      script.src = new URL(url, location.href);
      inner.document.documentElement.append(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.onmessage?.(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
