// Command kubernetes is every Kubernetes daemon of the local node, and kubectl, in one binary. The name it is called by chooses which one
// runs, so each is a symbolic link to it; else the first argument does. One binary links the shared half of Kubernetes once, which is most
// of the time and the size of six.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var commands = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	name := filepath.Base(os.Args[0])
	if commands[name] == nil && len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = os.Args[1:]
	}
	command := commands[name]
	if command == nil {
		fmt.Fprintf(os.Stderr, "usage: kubernetes %s ...\n", strings.Join(names(), "|"))
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}

func names() []string {
	all := make([]string, 0, len(commands))
	for name := range commands {
		all = append(all, name)
	}
	sort.Strings(all)
	return all
}
