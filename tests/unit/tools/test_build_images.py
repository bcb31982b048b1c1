"""The bill of materials of an image."""

from tools.build_images import bill_of_materials


def test_a_bill_of_materials_has_package_urls_and_licences() -> None:
    packages = {
        "pypi": [["Typing_Extensions", "4.16.0", "PSF-2.0"], ["grpcio", "1.80.0", None]],
        "deb/debian": [["libc6", "2.36-9+deb12u13", None]],
        "bytes": 1,
    }
    bill = bill_of_materials("quire-gateway:1", packages)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "quire-gateway"
    assert [each["purl"] for each in bill["components"]] == [
        "pkg:pypi/typing-extensions@4.16.0",
        "pkg:pypi/grpcio@1.80.0",
        "pkg:deb/debian/libc6@2.36-9+deb12u13",
    ]
    assert bill["components"][0]["licenses"] == [{"expression": "PSF-2.0"}]
