{{/* Which variables does a pod get? Settings of refill only, and credentials of the store. */}}

{{- define "refill.environment" -}}
{{- $variables := dict
    "REFILL_PORT" .Values.ports.clients
    "REFILL_PEER_PORT" .Values.ports.peers
    "REFILL_METRICS_PORT" .Values.ports.metrics
    "REFILL_REPLICAS" .Values.replicas
    "REFILL_POD_URLS" (include "refill.podUrl" .)
    "REFILL_PEER_URLS" (printf "%s://%s:%d" (include "refill.scheme" .Values.tls.peerSecret) (include "refill.podHost" .) (int .Values.ports.peers))
    "REFILL_MEMORY_BYTES" (include "refill.memoryBytes" .)
    "REFILL_EXTRA_MEMORY_BYTES" (include "refill.bytes" .Values.extraMemory)
-}}
{{- if .Values.pinnedDisk.enabled -}}
{{- $_ := set $variables "REFILL_PINNED_DIR" (include "refill.pinnedDir" .) -}}
{{- $_ := set $variables "REFILL_PINNED_DIR_BYTES" (mulf (include "refill.bytes" .Values.pinnedDisk.size | float64) 0.9 | int64) -}}
{{- end -}}
{{- range $name, $value := .Values.settings -}}
{{- $_ := set $variables (printf "REFILL_%s" (upper $name)) (ternary (join "," $value) $value (kindIs "slice" $value)) -}}
{{- end -}}
{{- range $name, $value := .Values.store -}}
{{- if ne (toString $value) "" -}}
{{- $_ := set $variables (printf "REFILL_STORE_%s" (upper $name)) $value -}}
{{- end -}}
{{- end -}}
{{- $variables = merge $variables (include "refill.secretPaths" . | fromYaml) -}}
{{- range $name, $value := $variables }}
- name: {{ $name }}
  value: {{ include "refill.text" $value | quote }}
{{- end }}
{{- include "refill.credentials" . }}
{{- end }}

{{- define "refill.credentials" -}}
{{- with .Values.credentials }}
{{- if and .variables (not .existingSecret) }}
{{- fail "credentials.variables names keys of credentials.existingSecret, which is empty: name the Secret" }}
{{- end }}
{{- if .existingSecret }}
{{- $keys := dict "AWS_ACCESS_KEY_ID" .accessKeyIdKey "AWS_SECRET_ACCESS_KEY" .secretAccessKeyKey "AWS_SESSION_TOKEN" .sessionTokenKey }}
{{- $secret := .existingSecret }}
{{- range $name, $_ := $keys }}
{{- if hasKey $.Values.credentials.variables $name }}
{{- fail (printf "credentials.variables: %s is given by credentials.accessKeyIdKey, secretAccessKeyKey and sessionTokenKey" $name) }}
{{- end }}
{{- end }}
{{- range $name, $key := merge $keys .variables }}
{{- if $key }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ $key }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Folders within the mounts, since a new volume of its own may hold lost+found. */}}
{{- define "refill.pinnedDir" -}}
/var/lib/refill/pinned/samples
{{- end }}

{{/* Helm reads numbers as floats, and would write 4096000 as 4.096e+06. */}}
{{- define "refill.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}
