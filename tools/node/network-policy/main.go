// Command network-policy enforces NetworkPolicies on the local node: kube-router's policy controller without its router,
// service proxy and load balancer, which would link a BGP server and IPVS for nothing.
package main

import (
	"flag"
	"log"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"github.com/cloudnativelabs/kube-router/v2/pkg/svcip"
	"github.com/spf13/pflag"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// heartbeats is how many health reports may wait unread; nothing here reads them, so they are drained.
const heartbeats = 10

func main() {
	config := options.NewKubeRouterConfig()
	config.AddFlags(pflag.CommandLine)
	klog.InitFlags(nil)
	pflag.Parse()
	if err := flag.Set("logtostderr", "true"); err != nil {
		log.Fatal(err)
	}
	if err := run(config); err != nil {
		log.Fatalf("network-policy: %v", err)
	}
}

func run(config *options.KubeRouterConfig) error {
	client, factory, err := connect(config)
	if err != nil {
		return err
	}
	pods := factory.Core().V1().Pods().Informer()
	namespaces := factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()

	stop := make(chan struct{})
	factory.Start(stop)
	factory.WaitForCacheSync(stop)

	validator, err := svcip.NewValidator(svcip.Config{
		ClusterIPCIDRs: config.ClusterIPCIDRs,
		EnableIPv4:     config.EnableIPv4,
		EnableIPv6:     config.EnableIPv6,
	})
	if err != nil {
		return err
	}
	iptables, ipsets, err := netpol.NewIPTablesHandlers(config)
	if err != nil {
		return err
	}
	var ipsetMutex sync.Mutex
	controller, err := netpol.NewNetworkPolicyController(
		client, config, pods, policies, namespaces, &ipsetMutex, nil, iptables, ipsets, validator)
	if err != nil {
		return err
	}
	for informer, handler := range map[cache.SharedIndexInformer]cache.ResourceEventHandler{
		pods:       controller.PodEventHandler,
		namespaces: controller.NamespaceEventHandler,
		policies:   controller.NetworkPolicyEventHandler,
	} {
		if _, err := informer.AddEventHandler(handler); err != nil {
			return err
		}
	}

	health := make(chan *healthcheck.ControllerHeartbeat, heartbeats)
	go func() {
		for range health {
		}
	}()
	var running sync.WaitGroup
	running.Add(1)
	go controller.Run(health, stop, &running)

	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	<-signals
	close(stop)
	running.Wait()
	return nil
}

func connect(config *options.KubeRouterConfig) (kubernetes.Interface, informers.SharedInformerFactory, error) {
	rest, err := clientcmd.BuildConfigFromFlags(config.Master, config.Kubeconfig)
	if err != nil {
		return nil, nil, err
	}
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return nil, nil, err
	}
	return client, informers.NewSharedInformerFactory(client, 0), nil
}
