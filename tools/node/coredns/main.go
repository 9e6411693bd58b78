// Command coredns is CoreDNS with the plugins that the local node's Corefile uses, and nothing else:
// the stock build links some fifty, several of them with a cloud SDK behind them.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func init() {
	// The order in which plugins handle a query, as in CoreDNS's own plugin.cfg.
	dnsserver.Directives = []string{"ready", "health", "errors", "cache", "kubernetes"}
}

func main() {
	coremain.Run()
}
