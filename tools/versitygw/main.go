// Command versitygw is the S3 gateway over a local folder: one backend of its five, without the cloud SDKs of the others.
// The credentials come from the environment (ROOT_ACCESS_KEY, ROOT_SECRET_KEY), never from the command line, where `ps` shows them.
package main

import (
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

const (
	concurrency    = 5000
	maxConnections = 4096
	maxParts       = 10_000  // the limit of Amazon S3
	maxCopyBytes   = 5 << 30 // the limit of one CopyObject in Amazon S3
)

func main() {
	port := flag.String("port", "", "address to listen on, host:port")
	versions := flag.String("versioning-dir", "", "folder for noncurrent object versions")
	health := flag.String("health", "/healthz", "unauthenticated health path")
	flag.Parse()
	if flag.NArg() != 1 || *port == "" {
		log.Fatal("usage: versitygw --port HOST:PORT [--versioning-dir DIR] DIR")
	}
	root := flag.Arg(0)
	attributes := meta.XattrMeta{}
	if err := attributes.Test(root); err != nil {
		log.Fatalf("versitygw: %s cannot hold extended attributes: %v", root, err)
	}
	backend, err := posix.New(root, attributes, posix.PosixOpts{
		VersioningDir:       *versions,
		NewDirPerm:          0o755,
		ValidateBucketNames: true,
		CopyObjectThreshold: maxCopyBytes,
		Concurrency:         concurrency,
	})
	if err != nil {
		log.Fatalf("versitygw: %v", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err = embedgw.RunVersityGW(ctx, backend, &embedgw.Config{
		RootUserAccess:    os.Getenv("ROOT_ACCESS_KEY"),
		RootUserSecret:    os.Getenv("ROOT_SECRET_KEY"),
		Ports:             []string{*port},
		MaxConnections:    maxConnections,
		MaxRequests:       maxConnections,
		HealthPath:        *health,
		KeepAlive:         true,
		MultipartMaxParts: maxParts,
		Quiet:             true,
		DisableACLs:       true,
	})
	if err != nil && ctx.Err() == nil {
		log.Fatalf("versitygw: %v", err)
	}
}
