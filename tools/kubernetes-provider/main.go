// Command pulumi-resource-kubernetes is the official Kubernetes provider for Pulumi.
//
// The provider's own main embeds two generated files which its module does not carry. This one reads the module's schema.json and
// terraform-mapping.json, which the tool build puts beside the binary.
package main

import (
	"bytes"
	"log"
	"os"
	"path/filepath"

	"github.com/pulumi/pulumi-kubernetes/provider/v4/pkg/provider"
	"github.com/pulumi/pulumi-kubernetes/provider/v4/pkg/version"
)

func main() {
	binary, err := os.Executable()
	if err != nil {
		log.Fatalf("cannot find the folder of this binary: %v", err)
	}
	schema := readBeside(binary, "schema.json")
	schema = bytes.Replace(schema, []byte(`"name":`), []byte(`"version": "`+version.Version+`", "name":`), 1)
	provider.Serve("kubernetes", version.Version, schema, readBeside(binary, "terraform-mapping.json"))
}

func readBeside(binary, name string) []byte {
	path := filepath.Join(filepath.Dir(binary), name)
	content, err := os.ReadFile(path)
	if err != nil {
		log.Fatalf("the provider's %s is missing: %v", name, err)
	}
	return content
}
