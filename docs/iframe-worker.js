/* The search of Material runs in a worker, and browsers start none for a page that was opened from a folder (file://): there
   an invisible frame of the same page takes its place. On a web server this file does nothing. */
if (location.protocol === "file:") {
  window.IFrameWorker = true; // how the worker's script finds its languages
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.importScripts = (...addresses) => Promise.all(addresses.map((each) => this.load(each)));
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.load(address).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    load(address) {
      return new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script");
        Object.assign(script, { src: String(address), onload: resolve, onerror: reject });
        this.inner.document.body.append(script);
      });
    }

    postMessage(data) {
      if (this.waiting) { this.waiting.push(data); } else { this.inner.dispatchEvent(new MessageEvent("message", { data })); }
    }

    terminate() { this.inner.frameElement.remove(); }
  };
}
