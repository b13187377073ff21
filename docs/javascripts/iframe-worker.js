// The search of the site runs in a Worker. Browsers refuse a Worker on pages that are opened from files (file://).
// There, this script replaces Worker by a hidden frame that runs the same program.
// mkdocs-material loads a script from outside, unless a file of the site has this name.
if (location.protocol === "file:") {
  window.Worker = class FrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<!doctype html>"
      this.program = new Promise((resolve, reject) => {
        this.frame.onload = () => resolve(this.start(url))
        this.frame.onerror = reject
      })
      document.body.append(this.frame)
    }

    // Gives the frame the functions of a worker, and loads the program.
    start(url) {
      const inside = this.frame.contentWindow
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          Object.assign(script, { src: source, onload: resolve, onerror: reject })
          inside.document.body.append(script)
        })
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source)
      }
      inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data })
        this.dispatchEvent(message)
        this.onmessage?.(message)
      }
      return load(url).then(() => inside)
    }

    postMessage(data) {
      this.program.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
